# `make demo` and `make test` need only Python (3.11 or newer) and make: the first one to run makes
# the virtual environment from the pinned versions of requirements/, the other then uses it.

PYTHON ?= $(shell .ci/find-python)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOCKS := $(wildcard requirements/*.txt)

# With an NVIDIA GPU, jax gets its CUDA libraries and runs there; without one it stays on the CPU,
# and on Linux gets the wheels that compile for a GPU that is not there.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifeq ($(GPU),yes)
  EXTRA_LOCK := gpu-
  export XLA_PYTHON_CLIENT_PREALLOCATE ?= false
else
  EXTRA_LOCK := $(if $(filter Linux,$(shell uname -s)),plan-gpu-)
  export JAX_PLATFORMS ?= cpu
endif

# Two test processes with two threads each, whatever the machine has: the same sums in the same
# order everywhere. XLA reads NPROC; with one thread its host callbacks can deadlock.
JOBS ?= 2
THREADS ?= 2
TEST_ENV := NPROC=$(THREADS) OMP_NUM_THREADS=$(THREADS) OPENBLAS_NUM_THREADS=$(THREADS) \
	PYTHONHASHSEED=0

.PHONY: help demo test test-spread test-slow notebooks check-notebooks lint types format lock \
	vendor clean

help:
	@echo "make demo    train a GPT inside 60, 40 and 25% of its memory, then plan for an absent H100"
	@echo "make test    run the tests and the examples in docstrings (ARGS='-k plan' for some of them)"
	@echo "make test-spread  the tests without those marked wide; make test-slow: the slow ones"
	@echo "make notebooks  execute the notebooks from their scripts (ARGS=1_ for one of them)"
	@echo "make check-notebooks  execute them, and compare with what is committed"
	@echo "make lint    ruff; make format applies what it can"
	@echo "make types   pyright"
	@echo "make lock    resolve the pinned versions anew, for the Python of $(VENV)"
	@echo "make vendor  fetch the charting library of HTML reports anew (needs npm)"
	@echo "make clean   remove the virtual environments and caches"

demo: $(INSTALLED)
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# What .ci/run leaves to the other Python, and what no Python runs by default.
test-spread: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not wide" $(ARGS)

test-slow: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow $(ARGS)

notebooks: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python notebooks/execute.py $(ARGS)

check-notebooks: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python notebooks/execute.py --check $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

lock: $(INSTALLED)
	$(BIN)/python requirements/lock.py

vendor: $(INSTALLED)
	$(BIN)/python requirements/vendor.py

# Python 3.11 has its own lock files (jax stops at 0.10.2 there); newer ones share those of 3.12.
$(INSTALLED): pyproject.toml $(LOCKS)
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv $(VENV)
	@echo "Installing the pinned packages into $(VENV) (1.8 GB on disk; more with a GPU)"
	@set -e; \
	lock=$$($(BIN)/python -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")'); \
	pip="$(BIN)/python -m pip --disable-pip-version-check --no-input"; \
	$$pip install --quiet --no-deps --requirement requirements/$$lock.txt \
		$(if $(EXTRA_LOCK),--requirement requirements/$(EXTRA_LOCK)$$lock.txt); \
	$$pip install --quiet --no-deps --no-build-isolation --editable .; \
	$$pip check
	@touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
