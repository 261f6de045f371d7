# Each target first makes the environment it needs in .venv; on a fresh machine python3 (with venv and pip) is enough.
#
#   make test     the tests                         make lint     ruff and mypy
#   make demo     train a small model on a CPU      make docs     the pages, in docs/_build/html
#   make bench    speed on this machine's CPU       make clean    remove everything that was made
#
# Variables: PYTHON (interpreter for .venv), JOBS (test processes), ARGS (passed on to the tool of the target),
# PIP_CONSTRAINT (pip's own; by default the versions that CI tests, and empty for the newest ones).

PYTHON ?= python3
JOBS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')
ARGS ?=
export PIP_CONSTRAINT ?= $(CURDIR)/.ci/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK = 1
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: test lint types docs demo bench wheel clean

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --no-input

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not nightly" --timeout 300 $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

types: .venv/.dev
	@rm -rf build/types && mkdir -p build/types/flexbwd
	@ln -s $(CURDIR)/flexbwd/* $(CURDIR)/mods $(CURDIR)/sparsity build/types/flexbwd/
	set -o pipefail; $(BIN)/mypy $(ARGS) | sed -e 's,build/types/flexbwd/\(mods\|sparsity\)/,\1/,' -e 's,build/types/,,'

docs: .venv/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html $(ARGS)
	@echo "docs/_build/html/index.html"

demo: .venv/.demo
	$(BIN)/python docs/demo/train.py --out demo-output $(ARGS)

bench: .venv/.dev
	$(BIN)/flexbwd bench --device cpu --out docs/benchmarks $(ARGS)

wheel: .venv/.dev
	rm -rf build/lib build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	@ls build/wheel/*.whl

clean:
	rm -rf .venv build dist docs/_build demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find flexbwd mods sparsity tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.dev: pyproject.toml .ci/constraints.txt | .venv/bin/python
	$(PIP) --editable '.[dev]'
	@touch $@

.venv/.docs: pyproject.toml .ci/constraints.txt | .venv/bin/python
	$(PIP) --editable '.[docs]'
	@touch $@

.venv/.demo: pyproject.toml .ci/constraints.txt | .venv/bin/python
	$(PIP) --editable '.[viz]'
	@touch $@
