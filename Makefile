# Two commands on a fresh machine: `make caption` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# Without a GPU the small CPU build is enough; PyPI's own wheel for Linux brings gigabytes of CUDA.
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
BASE := $(VENV)/.base
DEV := $(VENV)/.dev
# One thread a process: tests run in parallel processes, and a small model gains nothing from more.
export OMP_NUM_THREADS ?= 1

.PHONY: caption test check format clean

caption: $(BASE)  ## caption the pictures and the clip in examples/
	$(BIN)/k3vl caption examples

test: check  ## everything that must hold before a commit; the browser tests want `apt-get install chromium`
	$(BIN)/pytest -n auto --dist loadgroup

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "k3vl needs Python 3.11 or newer; try: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml $(BIN)/python
	@if command -v nvidia-smi >/dev/null; then echo "GPU found: torch comes with CUDA"; else \
		$(BIN)/pip install --quiet --no-deps --retries 1 --timeout 15 \
			--extra-index-url $(TORCH_INDEX) "$(TORCH)"; fi
	$(BIN)/pip install --quiet --editable .
	@touch $@

$(DEV): $(BASE)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
