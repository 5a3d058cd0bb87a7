# Two commands matter: `make demo` and `make test`. Each sets up what it needs in .venv, from Python 3.11 and the package registry alone.
#
#   make demo       train a small model on a shipped text (examples/quickstart.py)
#   make test       the core tests
#   make test-all   lint, and every test
#   make bench      on a GPU: time every op and the training step beside their peers, and rewrite the docs' table
#   make lint       ruff (rules and format) and mypy
#   make format     let ruff rewrite what it can
#   make clean      remove .venv and the caches
#
# Variables: PYTHON (the interpreter that makes .venv), JOBS (test processes), ARGS (more arguments for pytest or the demo),
# PIP_FLAGS (for example another index: PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" for torch without CUDA).

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
PIP_FLAGS ?=

VENV := .venv
PY := $(VENV)/bin/python
# One resolver run a stamp, under one set of pins: torch is never left to a range, which could bring another build of several gigabytes.
PIP := $(PY) -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)

# One thread a test process: the processes already fill the cores, and Triton's interpreter only loses by more.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal

.PHONY: help demo test test-all bench lint format clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

# A stamp, not the interpreter, says that the environment is whole: an interrupted run starts it afresh.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) setuptools
	@touch $@

$(VENV)/demo-installed: $(VENV)/made pyproject.toml setup.cfg constraints.txt
	$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

$(VENV)/test-installed: $(VENV)/demo-installed
	$(PIP) --no-build-isolation --editable '.[test,lint]'
	@touch $@

demo: $(VENV)/demo-installed
	$(PY) examples/quickstart.py $(ARGS)

test: $(VENV)/test-installed
	$(PYTEST) -m "not slow and not alone" $(ARGS)

# Tests that measure time or memory come first, with nothing beside them and every thread (exit status 5: no such test was selected).
test-all: lint
	$(PY) -m pytest -m alone $(ARGS) || [ $$? -eq 5 ]
	$(PYTEST) -m "not alone" $(ARGS)

# In the interpreter that PYTHON names, whose torch knows the GPU; .venv holds a CPU build on many machines.
RESULTS = benchmarks/results/$(shell nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr "A-Z " "a-z-")-$(shell date +%Y-%m-%d)
bench:
	$(PYTHON) -m benchmarks.run --out $(RESULTS)-kernels.json
	$(PYTHON) benchmarks/train_step.py --out $(RESULTS)-llama-3.2-1b-4x4096.json
	$(PYTHON) -m benchmarks.tables

lint: $(VENV)/test-installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy

format: $(VENV)/test-installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
