# Everything runs in a virtual environment that the targets make for themselves.
# Needs python3 (3.11 or newer) with pip. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= auto
SECONDS ?= 600
SEED ?= 1
FUZZ_ARGS ?=
FUNCTIONS_ARGS ?=
PYTEST_ARGS ?=
SHARE ?= 8
GPU_ARGS ?=
AMD_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all smoke functions fuzz gpu amd bench lint format types docs dist clean
# Two pips must not write into one environment at once.
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile | awk -F': ' '{printf "  make %-9s %s\n", $$1, $$2}'

venv: $(VENV)/.installed-test ## only set up .venv, with the package and what its tests need

demo: $(VENV)/.installed-test ## one portable kernel on every backend present, beside XLA
	@$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test ## the tests, with an eighth (SHARE=8) of the large tables
	PALLASITE_TEST_SHARE=$(SHARE) \
	  $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test ## every case of every test, with the slow ones
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

smoke: $(VENV)/.installed-test ## the tests to run before every commit
	$(BIN)/python -m pytest -q tests/test_smoke.py tests/test_rules.py

functions: $(VENV)/.installed-test ## every public function of JAX in a kernel, with its derivatives
	$(BIN)/python -m tests.functions --json $(VENV)/functions.json $(FUNCTIONS_ARGS)

fuzz: $(VENV)/.installed-test ## random kernels on every engine, SECONDS=600 long from SEED=1 on
	$(BIN)/python -m tests.fuzz.hunt --seconds $(SECONDS) --seed $(SEED) $(FUZZ_ARGS)

gpu: $(VENV)/.gpu-compiler ## the kernel zoo through XLA's compiler for an H200, without a GPU
	$(BIN)/python -m tests.backends.gpu_compile $(GPU_ARGS)

amd: $(VENV)/.installed-test $(VENV)/.installed-amd-compiler ## zoo, gradients and library by Triton for three AMD GPUs, without one
	for chip in mi300x mi355x r9700; do \
	  $(BIN)/python -m tests.backends.gpu_compile --chip $$chip --library --change none grad $(AMD_ARGS) || exit 1; \
	done

bench: $(VENV)/.installed-test ## the library beside XLA, and cuDNN, torch, Tokamax where present
	$(BIN)/python -m pallasite bench $(BENCH_ARGS)

lint: $(VENV)/.installed-dev ## ruff, rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## ruff, mending what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-test $(VENV)/.installed-dev ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.installed-docs ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(VENV)/.installed-release ## wheel and sdist in dist/, checked for an index
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

clean: ## remove the virtual environments and everything built
	rm -rf $(VENV) .venv-* build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `python -m venv` cannot bring pip where ensurepip is packaged apart (Debian): then the
# outer pip installs one.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Pallasite needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }

# One stamp per extra; a changed pyproject.toml installs again.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "==> installing pallasite[$*] into $(VENV) (minutes, the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[$*]'
	@touch $@

# JAX's plugin for CUDA, of the release of JAX that is here, with ptxas and libdevice; in
# a folder of its own, because JAX takes an installed plugin for a device.
$(VENV)/.gpu-compiler: $(VENV)/.installed-test
	@echo "==> installing XLA's compiler for GPUs into $(VENV)/gpu_compiler"
	@rm -rf $(VENV)/gpu_compiler
	@jax=$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("jax"))') && \
	  $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps \
	  --target $(VENV)/gpu_compiler jax-cuda13-plugin==$$jax jax-cuda13-pjrt==$$jax \
	  'nvidia-cuda-nvcc>=13,<14' 'nvidia-nvvm>=13,<14'
	@touch $@
