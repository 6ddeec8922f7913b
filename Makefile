# Sets up its own environment in .venv and runs there. Needs python3 (3.10 or later) and make; no GPU, no root, no account.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
VLLM ?= 0.32.0
VLLM_VENV ?= .venv-vllm
WITH_VLLM := $(VLLM_VENV)/with-vllm-$(VLLM)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install $(if $(CI),--quiet)

# PyPI's torch for Linux is a CUDA build of several GB. A version that ends in "+cpu" cannot come from PyPI: pip finds it in an index
# or folder of wheels that it is configured for, or else in PyTorch's own index of CPU builds.
TORCH ?= torch==$(shell sed -n 's/^torch==//p' constraints.txt)+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-vllm install-vllm soak doctor calibrate clean

help: ## List these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | awk -F '\t' '{ printf "make %-13s%s\n", $$1, $$2 }'

install: $(VENV)/installed ## Create .venv and install the project in it (once; the targets below do it too)

demo: $(VENV)/installed ## Run the MoE layer on all communication models; options go in ARGS="..."
	$(BIN)/inc demo $(ARGS)

doctor: $(VENV)/installed ## Say what this machine can run, and what to do about what is missing
	$(BIN)/inc doctor $(ARGS)

test: $(VENV)/installed ## Check style and types, and run the tests; options for pytest go in ARGS="..."
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)

MEASURED = $(wildcard results/data/machine_figures_*.csv results/data/expert_matmul_*.csv results/data/collectives_*.csv \
    results/data/moe_layer_*.csv results/data/speed_ups_*.csv)

calibrate: $(VENV)/installed ## Fit the simulator to all measured data, and write predicted against measured to results/tables
	$(BIN)/inc simulate --calibrate $(sort $(MEASURED)) --name two_h200 \
	    --output inc_runtime/simulator/calibrations/two_h200.json --table results/tables/predicted.md $(ARGS)

install-vllm: $(WITH_VLLM) ## Install vLLM for CPUs in .venv-vllm, in the place of another version there (2 GB); test-vllm does it too

test-vllm: $(WITH_VLLM) ## Serve small models through vLLM in an environment of its own; VLLM=0.27.1 is the oldest version
	$(VLLM_VENV)/bin/python -m pytest tests/serving $(ARGS)

soak: $(WITH_VLLM) ## 10,000 requests to a server with 4 ranks, and 200 prompts with W = 1 and 4
	INC_TEST_SOAK=10000 INC_TEST_PROMPTS=200 INC_TEST_RANKS=4 $(VLLM_VENV)/bin/python -m pytest -s tests/serving/test_vllm.py $(ARGS)

clean: ## Remove .venv and what builds and tools left
	rm -rf $(VENV) $(VLLM_VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo 'make: $(PYTHON) is missing or older than 3.10. Name another one: make PYTHON=/path/to/python3 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo 'make: $(PYTHON) cannot create environments. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/torch: constraints.txt | $(BIN)/python
	@echo 'Installing $(TORCH), then the project: a minute or two, once.'
	@$(INSTALL) --no-deps '$(TORCH)' 2>/dev/null || \
	    $(INSTALL) --no-deps --timeout 20 --retries 2 --index-url $(TORCH_INDEX) '$(TORCH)' || \
	    { echo 'make: no CPU build of torch to be had: neither in the indexes that pip is configured for, nor at $(TORCH_INDEX).' >&2; \
	      echo '  Name a mirror that holds it: make TORCH_INDEX=URL ...; or a folder of wheels: PIP_FIND_LINKS=FOLDER make ...' >&2; \
	      echo '  or accept the CUDA build of PyPI (several GB): make TORCH=$(subst +cpu,,$(TORCH)) ...' >&2; exit 1; }
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/torch
	$(INSTALL) --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(WITH_VLLM): pyproject.toml tests/serving/install_vllm.py
	$(MAKE) VENV=$(VLLM_VENV) $(VLLM_VENV)/torch
	rm -f $(VLLM_VENV)/with-vllm-*
	$(VLLM_VENV)/bin/python -m tests.serving.install_vllm $(VLLM)
	@touch $@
