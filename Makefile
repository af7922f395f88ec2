# Two commands for a fresh machine with nothing but Python >= 3.11: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/installed  ## train seven small models with different mixers, measure them, write runs/demo/report.html
	$(BIN)/needlework compare

test: .venv/installed  ## lint, then every test
	$(BIN)/ruff check needlework recipes tests
	$(BIN)/ruff format --check needlework recipes tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"needlework needs Python >= 3.11, this is {sys.version}"'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[all,test]'
	touch $@

clean:  ## remove the virtual environment; runs stay
	rm -rf .venv
