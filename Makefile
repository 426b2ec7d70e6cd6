# Each target makes its own .venv and installs what it needs, pinned in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
TOOLS := $(VENV)/.tools
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept, even if the environment turns that off. The tests start many processes,
# and each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup test lint pytest quickstart sanitize clean

setup: $(TOOLS)

$(PACKAGE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "xlstm7b needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[train]'
	touch $@

# Modules are compiled when they are first imported. Most of them never are.
$(TOOLS): $(PACKAGE)
	$(BIN)/pip install --quiet --no-compile --editable '.[dev]'
	touch $@

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint pytest

pytest: $(TOOLS)
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

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
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
