# `make demo` (minutes), `make study` (a day) and `make test` set up what they need first; the second time they find it ready.
# Not the link in an activated environment, which may be made again.
PYTHON ?= $(shell "$$(command -v python3.11 || command -v python3)" -c 'import os, sys; print(os.path.realpath(sys.executable))')
VENV := .venv
BIN := $(VENV)/bin
DEMO := experiments/grids/footprint.yaml --profile digits
# Runs a step and prints and records how long it took.
STEP = ./.ci/step
# -qq below: errors only. Without these two, pip advises on itself in every step.
export PIP_ROOT_USER_ACTION := ignore
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo study weights faults soak docs gallery test test-all test-clients test-torch test-latest wheel lint audit format setup gpu-check clean

demo: setup
	@$(STEP) "digits as JPEGs" $(BIN)/san data prepare digits
	@$(STEP) "grid footprint" $(BIN)/san run $(DEMO)

# Train the networks of the study on CIFAR-10 over five seeds, except the trials in docs/results/cifar10/trials.csv, and write the
# page beside it.
study: setup
	@$(STEP) "CIFAR-10" $(BIN)/san data prepare cifar10
	@$(STEP) "study" $(BIN)/san study --profile cifar10 --seeds 5

# Train the networks whose weights the package contains (6 to 12 hours on two cores), and write san/weights.
weights: setup
	@$(STEP) "CIFAR-10" $(BIN)/san data prepare cifar10
	@$(STEP) "training" $(BIN)/san run experiments/grids/pretrained.yaml --profile cifar10-full
	@$(BIN)/python -m experiments.cli.weights

# Inject faults into real processes (25 minutes; the row of a full disk needs root) and print rows of the table in docs/results/faults.md.
faults: setup
	@$(STEP) "faults" $(BIN)/python -m tests.faults.faults

# Build the documentation into site/. Fails on broken links and on pages that are not in the navigation.
docs: setup
	@$(BIN)/python -m docs.generate
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Make the pictures in docs/images with the commands of docs/guides/attention.md and the two below (a quarter of an hour).
gallery: setup
	@sed -n '/^<!-- not run/,/^```$$/d;/^```sh$$/,/^```$$/{/^```/!p}' docs/guides/attention.md | PATH="$(CURDIR)/$(BIN):$$PATH" sh -ex
	@$(BIN)/san run $(DEMO)
	@cp runs/footprint-digits/plot.png docs/images/footprint-digits.png
	@chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,1455 --screenshot=docs/images/report.png \
	  runs/footprint-digits/report.html

CLIENTS := .clients
CLIENT_TESTS := env PYTHONPATH=$(CLIENTS) $(BIN)/python -m pytest -n 2 --dist worksteal tests/clients

# The everyday tests. Two processes, because tests often wait for processes that they start. In the order of tests/conftest.py:
# otherwise the files with the fewest tests, which take longest, would be last.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: setup lint
	@$(STEP) "tests" $(PYTEST) -m "not slow" --durations=20
	@$(STEP) "tests with smaller instruction sets" $(BIN)/python -m tests.every_isa

# The everyday tests, then those with servers, compilers and long grids, and those with other packages.
test-all: test $(CLIENTS)/.installed
	@$(STEP) "slow tests" $(PYTEST) -m slow --durations=50
	@$(STEP) "clients" $(CLIENT_TESTS)

# Build a wheel of the library with the CPU kernels into dist/; using it needs no compiler.
wheel: setup
	@$(BIN)/python -m cuda_ext.wheel dist

# Tests with timm, torchvision, captum, Lightning and huggingface_hub, which are installed next to the environment.
test-clients: $(CLIENTS)/.installed
	@$(STEP) "clients" $(CLIENT_TESTS)

$(CLIENTS)/.installed: requirements-clients.txt | setup
	@rm -rf $(CLIENTS)
	@$(BIN)/pip install -qq --no-deps --target $(CLIENTS) -r $<
	@touch $@

# Disturb `san run` at random for SOAK_MINUTES, with the random seed SOAK_SEED (see tests/faults/soak.py). Needs root.
SOAK_MINUTES ?= 30
SOAK_SEED ?= 1
soak: setup
	@$(BIN)/python -m tests.faults.soak --minutes $(SOAK_MINUTES) --seed $(SOAK_SEED)

# The library's tests with another release of torch, in an environment of its own: `make test-torch TORCH=2.11.0`, the oldest that
# is supported, or 2.13.0. PYTHON=python3.13 selects another version of Python. It takes some GB and minutes.
TORCH ?= 2.11.0
TORCH_VENV := .venv-torch-$(TORCH)$(if $(filter command line environment,$(origin PYTHON)),-$(notdir $(PYTHON)))
test-torch: $(TORCH_VENV)/.installed
	@$(STEP) "tests with torch $(TORCH)" $(TORCH_VENV)/bin/python -m pytest tests/ops tests/nn tests/models

# numpy, setuptools and onnxscript as that torch wants them; the others as pinned.
$(TORCH_VENV)/.installed: requirements.txt
	@$(STEP) "environment $(TORCH_VENV)" "$(PYTHON)" -m venv $(TORCH_VENV)
	@$(STEP) "torch $(TORCH)" $(TORCH_VENV)/bin/pip install -qq torch==$(TORCH) numpy setuptools onnxruntime onnxscript \
	  $$(grep -E '^(click|hypothesis|psutil|py-spy|pydantic|pytest|pytest-timeout|PyYAML|safetensors)==' requirements.txt)
	@touch $@

# The everyday tests with the newest releases of all packages in the extras, without pins and upper bounds, in an environment of its
# own, which every call updates. It takes 8 GB with torch's CUDA build.
LATEST_VENV := .venv-latest
UNBOUNDED := import re, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  names = sum(project["optional-dependencies"].values(), project["dependencies"]); \
  print(re.sub(r",<\S+", "", " ".join(names)))
test-latest:
	@$(STEP) "environment $(LATEST_VENV)" "$(PYTHON)" -m venv $(LATEST_VENV)
	@$(STEP) "torch" $(LATEST_VENV)/bin/pip install -qq --upgrade torch setuptools wheel
	@$(STEP) "newest releases" env DS_IGNORE_CUDA_DETECTION=1 $(LATEST_VENV)/bin/pip install -qq --upgrade \
	  --upgrade-strategy eager --no-build-isolation $$("$(PYTHON)" -c '$(UNBOUNDED)')
	@$(STEP) "the project itself" $(LATEST_VENV)/bin/pip install -qq --no-build-isolation --no-deps -e .
	@$(STEP) "tests with the newest releases" $(subst $(BIN),$(LATEST_VENV)/bin,$(PYTEST)) -m "not slow"

CPP := find cuda_ext -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'
lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $$($(CPP))

# Known vulnerabilities of the pinned packages; needs the network, and says so where it is missing.
audit:
	@PYTHON="$(PYTHON)" ./.ci/audit

format: setup
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	@$(BIN)/clang-format -i $$($(CPP))

# On a machine with a GPU: tests and times the most important cases in ten minutes (tests/gpu). Results go to runs/gpu-check.
# A machine that has torch, numpy and nvcc but not this environment: `make gpu-check GPU_PYTHON=python3 GPU_SETUP=`.
GPU_PYTHON ?= $(BIN)/python
GPU_SETUP ?= setup
gpu-check: $(GPU_SETUP)
	@$(GPU_PYTHON) -m tests.gpu --device cuda --out runs/gpu-check --report

setup: $(VENV)/.installed
	@$(STEP) "kernels" $(BIN)/python -m cuda_ext.build

# torch comes first and through pip, which may know a copy that uv does not: deepspeed's build looks for it. That build also probes
# its CUDA operators, of which we use none, and would fail on a machine with a GPU but no CUDA toolkit: DS_IGNORE_CUDA_DETECTION.
# uv installs the rest in a tenth of pip's time; if it fails (say, behind a proxy that only pip knows), pip does. Compiled as by pip:
# otherwise, where Python may not write byte code, each process compiles MLflow and pandas again.
#
# An environment is made again if its installation was interrupted, if it was made in another folder (a clone was copied or renamed),
# or if another PYTHON is given.
VERSION_OF = -c 'import sys; print(*sys.version_info[:2], sep=".")'
VERSION := $(if $(filter command line environment,$(origin PYTHON)),$(shell "$(PYTHON)" $(VERSION_OF)))
IS_CURRENT = [ "$$(head -n $(if $(VERSION),2,1) $(VENV)/.installed 2>&-)" = "$$(printf '%s\n' "$(CURDIR)" $(VERSION))" ]
.PHONY: outdated
$(VENV)/.installed: requirements.txt setup.py pyproject.toml $(shell $(IS_CURRENT) || echo outdated)
	@"$(PYTHON)" -c 'import sys; sys.version_info[:2] in ((3, 11), (3, 12), (3, 13)) or sys.exit("san needs Python 3.11, 3.12 or 3.13, \
	not " + sys.version.split()[0] + ": make setup PYTHON=/path/to/python3.11")'
	@$(IS_CURRENT) || { [ ! -e $(VENV) ] || echo "$(VENV): incomplete, or made elsewhere or for another Python; it is made again"; rm -rf $(VENV); }
	@rm -f $@
	@$(STEP) "environment $(VENV)" "$(PYTHON)" -m venv $(VENV)
	@$(STEP) "torch" $(BIN)/pip install $$(grep -E '^(torch|setuptools|wheel|uv)==' requirements.txt)
	@$(STEP) "pinned dependencies" env DS_IGNORE_CUDA_DETECTION=1 VIRTUAL_ENV=$(VENV) sh -c '\
	  $(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --system-certs --no-deps --no-build-isolation-package deepspeed -r requirements.txt || \
	  $(BIN)/pip install --no-build-isolation -r requirements.txt'
	@$(STEP) "the project itself" $(BIN)/pip install -qq --no-build-isolation --no-deps -e .
	@printf '%s\n' "$(CURDIR)" "$$($(BIN)/python $(VERSION_OF))" > $@

# Leaves data/ and runs/ alone: they hold work.
clean:
	rm -rf $(VENV) .venv-torch-* .venv-latest $(CLIENTS) build dist site *.egg-info cuda_ext/prebuilt
