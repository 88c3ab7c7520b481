# These commands do everything on a fresh machine:
#   make demo    a trained pair of models, plain and speculative side by side
#   make serve   the same pair behind an HTTP server (OpenAI's API) on port 30000
#   make test    the test suite, without the exhaustive part (make test-all: everything;
#                SHARE=1/8: an eighth of the exhaustive part)
#   make dist    what a release consists of, in build/release/dist: sdists, wheels, SBOM
# TORCH=cpu installs the CPU build of torch (on Linux the default build brings CUDA, several GB).
# `.ci/run` is what CI runs. Nothing but Python >= 3.11 with venv is needed beforehand.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode of what is never imported takes a third of an installation.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
  --constraint constraints.txt
TORCH ?= default
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TESTFLAGS ?= -n 2 --dist worksteal
SHARE ?= 1/1
DEMOFLAGS ?=
SERVEFLAGS ?= --speculative-algorithm DFLASH

.PHONY: demo serve test test-all check format gpu-test dist clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n '2,8p' Makefile | cut -c3-

ifeq ($(filter $(TORCH),default cpu),)
$(error TORCH=$(TORCH) is unknown; use TORCH=cpu for the CPU build of torch, or leave it out)
endif

# Files in the environment record what is installed, so that a second run starts at once.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	  "forerun needs Python >= 3.11; name one with: make PYTHON=/path/to/python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch-cpu: constraints.txt | $(BIN)/python
	@echo "Installing the CPU build of torch into $(VENV) ..."
	@$(PIP) --no-deps --index-url $(TORCH_CPU_INDEX) torch
	@touch $@

TORCH_READY := $(if $(filter cpu,$(TORCH)),$(VENV)/.torch-cpu)

$(VENV)/.forerun: pyproject.toml constraints.txt $(TORCH_READY) | $(BIN)/python
	@echo "Installing forerun into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.forerun-dev: pyproject.toml constraints.txt $(TORCH_READY) | $(BIN)/python
	@echo "Installing forerun[dev] into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable '.[dev]' --editable ./bench --editable ./training
	@touch $@ $(VENV)/.forerun

demo: $(VENV)/.forerun
	@$(BIN)/forerun demo $(DEMOFLAGS)

serve: $(VENV)/.forerun
	@$(BIN)/forerun serve $(SERVEFLAGS)

test: $(VENV)/.forerun-dev
	@$(BIN)/python -m pytest -m "not exhaustive" $(TESTFLAGS)

test-all: $(VENV)/.forerun-dev
	@$(BIN)/python -m pytest --share $(SHARE) $(TESTFLAGS)

check: $(VENV)/.forerun-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test-all

format: $(VENV)/.forerun-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a machine with a GPU, whose own environment has the torch build for it: docs/gpu-tests.md.
gpu-test:
	$(PYTHON) -m pytest -q -m gpu

dist:
	@rm -rf build/release
	@PYTHON=$(PYTHON) .ci/dist build/release

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
