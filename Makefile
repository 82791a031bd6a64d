# make demo and make test work on a fresh machine: they make .venv, install what requirements.lock pins, then run.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV   ?= .venv
# The first Python of a supported version: PYTHON=… names another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 $$HOME/.pyenv/versions/3.1[123].*/bin/python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN    := $(VENV)/bin
VERSIONS ?= 3.11 3.12 3.13
UV     := $(shell command -v uv 2>/dev/null)

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/installed ## the main job: ten episodes of libero_object, two workers
	$(BIN)/vla-eval run --task libero_object --policy oracle --trials 1 --workers 2

test: $(VENV)/installed ## every test but those that need a GPU, in two processes
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# Who wants no bytecode beside the sources gets it elsewhere: without any, each process of the suite compiles every library anew.
ifneq ($(PYTHONDONTWRITEBYTECODE),)
test: export PYTHONDONTWRITEBYTECODE :=
test: export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode
endif

check: $(VENV)/installed ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy vla_eval tests
	$(BIN)/lint-imports

bench: $(VENV)/installed ## measure; writes docs/*.json
	@for script in $(filter-out benchmarks/certify_% benchmarks/gpu_%,$(wildcard benchmarks/[a-z]*.py)); do echo "$$script"; $(BIN)/python $$script || exit 1; done

certify-oracle: $(VENV)/installed ## the oracle over five suites, twice ten trials of each task: hours; writes docs/oracle.json and docs/oracle.md's tables
	$(BIN)/python benchmarks/certify_oracle.py $(ARGS)

matrix: ## the tests under every supported Python, one after the other, each in an environment of its own; VERSIONS=3.13 picks
	@tools/matrix.sh $(VERSIONS)

docs: $(VENV)/installed ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove what make made; runs in videos/ stay
	rm -rf $(VENV) .venv-3.* build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

lock: $(VENV)/installed ## resolve pyproject.toml anew into requirements.lock
	UV_NO_CONFIG=1 $(BIN)/uv pip compile pyproject.toml --extra rtx --group dev --group docs --universal --python-version 3.11 --fork-strategy fewest \
	  --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "make lock" --quiet -o requirements.lock

$(VENV)/installed: requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11, 3.12 or 3.13 with venv found (Debian: apt-get install python3-venv); name one with PYTHON=…" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifneq ($(UV),)
	$(UV) pip install --python $(BIN)/python --quiet --require-hashes --no-deps -r requirements.lock
	$(UV) pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation -e .
else
	$(BIN)/python -m pip install -qq --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
endif
	@touch $@

.PHONY: help demo test check bench certify-oracle matrix docs clean lock
