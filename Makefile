# kilat: `make serve` to try it, `make test` to test it. Every target does its own set-up.
# Variables: PYTHON (3.11 or newer), MODEL (a name from `kilat model list`), ARGS (flags for kilat), TESTS (pytest
# arguments), SKIP (a marker to leave out), SEEDS (how many clusters are simulated).
PYTHON ?= python3
MODEL ?= smollm2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := src tests bench tools setup.py
# simulated clusters of `make seeds`
SEEDS ?= 10000
# Tests that share the cores, then those that start servers and watch the clock, which have the machine to themselves.
TOGETHER := (logic or cpu)
ALONE := (cluster or e2e)
SHARED := -n logical --maxprocesses 4 --dist worksteal
# torch's threads would wait for each other's cores
PYTEST_SHARED := OMP_NUM_THREADS=1 $(BIN)/pytest -q $(SHARED)

.DEFAULT_GOAL := help
.PHONY: help setup serve weights test seeds check native native-check bench

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' Makefile

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

# status 5: none of TESTS is of this kind
test: weights seeds ## run every test that this machine can run: simulated seeds, logic, cpu, cluster, e2e
	@$(PYTEST_SHARED) -m "$(TOGETHER)$(if $(SKIP), and not $(SKIP))" $(TESTS); together=$$?; \
	$(BIN)/pytest -q -m "$(ALONE)$(if $(SKIP), and not $(SKIP))" $(TESTS); alone=$$?; \
	case $$together$$alone in 00|05|50) ;; *) exit 1;; esac

seeds: setup ## simulate SEEDS clusters under faults; what breaks is shown with its seed
	@$(BIN)/python -m bench.sim_seeds --seeds $(SEEDS)

check: setup ## format, lint, types, architecture, logic tests
	@echo "check: format";  $(BIN)/ruff format --check --quiet $(SOURCES) || { $(BIN)/ruff format --check $(SOURCES); exit 1; }
	@echo "check: lint";    $(BIN)/ruff check --quiet $(SOURCES)
	@echo "check: types";   $(BIN)/mypy --no-error-summary
	@echo "check: sizes";   $(BIN)/python tools/sizes.py --quiet
	@echo "check: architecture and logic tests"; $(PYTEST_SHARED) -m logic

native: ## build the runtime without Python: build/native/kilat-native and libkilat.so (needs g++)
	@$(MAKE) --no-print-directory -C native

native-check: ## C tests of the runtime under sanitizers, and EXECUTIONS (default 100000) damaged files for its readers
	@$(MAKE) --no-print-directory -C native check

bench: setup ## measure MODEL on this machine (results are not tests)
	@$(BIN)/kilat bench throughput --model $(MODEL) $(ARGS)
