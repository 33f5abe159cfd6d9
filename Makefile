# Two commands: `make demo` trains countdown at zero KLD and draws the curve; `make test` passes the tests.
# Both set up .venv first, on a bare machine with Python 3.11 or newer.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/countdown/demo

STUDY ?= runs/countdown/study
STUDY_FULL ?= runs/countdown/study-full

.PHONY: demo study study-full test lint check clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/rlloop train --config-name countdown run.dir=$(RUN)
	$(BIN)/python -m rlloop.recipes.countdown.report $(RUN)

# docs/collapse.md. Both go on where they were stopped.
study: $(VENV)/.ready
	$(BIN)/rlloop train --config-name countdown/collapse -m run.dir=$(STUDY) seed=0,1,2 \
		arm=zero_kld,switched_int4,lossy_sync,switched_int4_tis
	$(BIN)/rlloop compare $(STUDY) -o $(STUDY)/report.html

study-full: $(VENV)/.ready
	$(BIN)/rlloop train --config-name countdown/collapse -m run.dir=$(STUDY_FULL) seed=0,1,2 guard=clip,none,tis,icepop \
		arm=zero_kld,bf16,bf16_logits,fp8,int8,int5,int4,int4_tensor,fp4,switched_int4,switched_fp4,stale,lossy_sync
	$(BIN)/rlloop compare $(STUDY_FULL) -o $(STUDY_FULL)/report.html

test: $(VENV)/.ready-dev
	$(BIN)/pytest

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

check: lint test

clean:
	rm -rf $(VENV) build dist *.egg-info
