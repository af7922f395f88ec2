# Two commands for a fresh machine with nothing but Python >= 3.11: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/installed  ## train seven small models with different mixers, measure them, write runs/demo/report.html
	$(BIN)/needlework compare

# the interpreter's tests take longest: they run beside the others and are shown after them
KERNELS := tests/ops/test_kernels.py tests/ops/test_launch.py tests/ops/test_triton_*.py
test: .venv/installed  ## lint, every test, and the kernels in the interpreter
	$(BIN)/ruff check needlework recipes tests benchmarks
	$(BIN)/ruff format --check needlework recipes tests benchmarks
	export OMP_NUM_THREADS=1; \
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --disable-warnings $(KERNELS) > .venv/kernels.txt 2>&1 & kernels=$$!; \
	trap "kill $$kernels; exit 130" INT TERM; \
	$(BIN)/python -m pytest tests; failed=$$?; \
	wait $$kernels || failed=1; \
	cat .venv/kernels.txt; exit $$failed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"needlework needs Python >= 3.11, this is {sys.version}"'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[all,test]'
	touch $@

clean:  ## remove the virtual environment; runs stay
	rm -rf .venv
