# Everything a new machine needs; run `make help` for the list.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv lint test test-full chaos serve demo bench clean

PYTHON ?= $(shell .ci/find-python)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := .cache/smollm2-135m-instruct

# Tests bring their own settings.
TEST_ENV := env -u BATTEN_MODEL -u BATTEN_MODEL_NAME -u DATABASE_URL -u REDIS_URL

# A model of your own, or the demo model, which is made on first use.
ifeq ($(strip $(BATTEN_MODEL)),)
override BATTEN_MODEL := $(CURDIR)/$(MODEL)
endif
serve demo bench: export BATTEN_MODEL := $(BATTEN_MODEL)
ifeq ($(BATTEN_MODEL),$(CURDIR)/$(MODEL))
MODEL_READY := $(MODEL)/.made
endif

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(STAMP) ## .venv with Batten and everything it needs

$(STAMP): pyproject.toml .ci/install .ci/preflight
	@PYTHON="$(PYTHON)" .ci/preflight
	@PYTHON="$(PYTHON)" VENV="$(VENV)" .ci/install
	@touch $@

$(MODEL)/.made: $(STAMP) examples/smollm2.py
	$(BIN)/python examples/smollm2.py $(MODEL)
	@touch $@

lint: $(STAMP) ## formatting, lint, types, import rules
	@.ci/stage "format" $(BIN)/ruff format --check .
	@.ci/stage "lint" $(BIN)/ruff check .
	@.ci/stage "types" $(BIN)/mypy
	@.ci/stage "imports" $(BIN)/lint-imports

test: lint $(MODEL_READY) ## lint, then the tests
	@.ci/stage "tests" $(TEST_ENV) $(BIN)/pytest -q -m "not full"

test-full: lint $(MODEL_READY) ## lint, then all tests, the long ones included
	@.ci/stage "tests" $(TEST_ENV) $(BIN)/pytest -q

chaos: $(STAMP) ## batches in a system that is killed, frozen, cut off and emptied: 200 rounds
	$(TEST_ENV) $(BIN)/pytest -q -s tests/chaos

serve: $(MODEL_READY) $(STAMP) ## batten up with demo tenants and adapters
	$(BIN)/python examples/serve.py

demo: $(MODEL_READY) $(STAMP) ## three tenants, three adapters, a batch each, and the bill
	$(BIN)/python examples/demo.py --model "$(BATTEN_MODEL)"

bench: $(MODEL_READY) $(STAMP) ## benchmarks/
	$(BIN)/python -m benchmarks

clean: ## remove what make has made
	rm -rf $(VENV) .cache .demo .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
