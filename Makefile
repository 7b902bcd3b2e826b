# kilat: `make serve` to try it, `make test` to test it. Every target does its own set-up.
# Variables: PYTHON (3.11 or newer), MODEL (a name from `kilat model list`), ARGS (flags for kilat), TESTS (pytest
# arguments), SKIP (a marker to leave out).
PYTHON ?= python3
MODEL ?= smollm2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := src tests bench tools
# what a machine without an accelerator and a browser can run
HERE := not gpu and not multi_gpu and not browser

.DEFAULT_GOAL := help
.PHONY: help setup serve weights test check native native-check bench

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## install kilat and its tools into .venv (again only when pyproject.toml or constraints.txt changed)
	@:

$(STAMP): pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" tools/install.sh "$(VENV)"
	@touch $@

serve: setup ## serve MODEL (default smollm2) on http://127.0.0.1:8000
	@$(BIN)/kilat serve $(MODEL) $(ARGS)

weights: setup ## download the models that the tests use (cached; checked by SHA-256)
	@$(BIN)/kilat model pull smollm2
	@$(BIN)/kilat model pull qwen2.5-coder-0.5b

test: weights ## run every test that this machine can run: logic, cpu, cluster, e2e
	@$(BIN)/pytest -q -m "$(HERE)$(if $(SKIP), and not $(SKIP))" $(TESTS)

check: setup ## format, lint, types, architecture, logic tests
	@echo "check: format";  $(BIN)/ruff format --check --quiet $(SOURCES) || { $(BIN)/ruff format --check $(SOURCES); exit 1; }
	@echo "check: lint";    $(BIN)/ruff check --quiet $(SOURCES)
	@echo "check: types";   $(BIN)/mypy --no-error-summary
	@echo "check: sizes";   $(BIN)/python tools/sizes.py --quiet
	@echo "check: architecture and logic tests"; $(BIN)/pytest -q -m logic

native: ## build the runtime without Python: build/native/kilat-native and libkilat.so (needs g++)
	@$(MAKE) --no-print-directory -C native

native-check: ## C tests of the runtime under sanitizers, and EXECUTIONS (default 100000) damaged files for its readers
	@$(MAKE) --no-print-directory -C native check

bench: setup ## measure MODEL on this machine (results are not tests)
	@$(BIN)/kilat bench throughput --model $(MODEL) $(ARGS)
