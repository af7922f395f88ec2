# Two commands for a fresh machine with nothing but Python >= 3.11: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-all mutants lint clean docs

demo: .venv/installed  ## train seven small models with different mixers, measure them, write runs/demo/report.html
	$(BIN)/needlework compare

# The kernels' tests run in Triton's interpreter, a process of its own kind: neither run collects the other's files.
KERNELS := tests/ops/test_kernels.py tests/ops/test_launch.py $(wildcard tests/ops/test_triton_*.py)
PYTEST := $(BIN)/python -m pytest -p needlework.testing.speed -n 2 --disable-warnings
# Compiled files are kept, whatever the environment says: without them each process compiles every test and module again.
# A group of ranks is started once for a file, so a file stays with one worker; kernels' tests share nothing.
define tests
	@export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=; failed=0; \
	TIMEFORMAT='%R s of wall time, %U s of CPU in programs and %S s in the system'; \
	time { $(PYTEST) --dist loadscope -m $(1) tests $(addprefix --ignore=,$(KERNELS)) || failed=1; \
	TRITON_INTERPRET=1 $(PYTEST) --dist worksteal -m $(1) $(KERNELS) || failed=1; }; exit $$failed
endef

test: lint  ## every op and every kernel, in five to eight minutes on two cores: what to run while working
	$(call tests,"not slow")

test-slow: .venv/installed  ## what is left: tests over five seconds, and the products of which `test` has the rows that cover
	$(call tests,slow)

test-all: test test-slow  ## every test

mutants: .venv/installed  ## plant each bug of tests/mutants in a copy, where `test` must see it; prints the survivors
	$(BIN)/python tests/mutants/run.py

lint: .venv/installed
	$(BIN)/ruff check needlework tests benchmarks examples
	$(BIN)/ruff format --check needlework tests benchmarks examples
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

docs: .venv/docs-installed  ## the site, into site/; a warning is an error
	rm -rf site
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs site

.venv/docs-installed: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"needlework needs Python >= 3.11, this is {sys.version}"'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[all,test,eval,serve]'
	touch $@

clean:  ## remove the virtual environment; runs stay
	rm -rf .venv
