# Two commands: `make demo` trains countdown at zero KLD and draws the curve; `make test` passes the tests.
# Both set up .venv first, on a bare machine with Python 3.11 or newer.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/countdown/demo

.PHONY: demo test lint check clean

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
