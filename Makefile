# Two commands on a fresh machine: `make caption` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# Without a GPU the small CPU build is enough; PyPI's own wheel for Linux brings gigabytes of CUDA.
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
# SGLang's pins are not ours: it has an environment of its own.
SGLANG_VENV ?= .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_READY := $(SGLANG_VENV)/.ready
BASE := $(VENV)/.base
DEV := $(VENV)/.dev
# One thread a process: tests run in parallel processes, and a small model gains nothing from more.
export OMP_NUM_THREADS ?= 1

.PHONY: caption test test-sglang check format clean

caption: $(BASE)  ## caption the pictures and the clip in examples/
	$(BIN)/k3vl caption examples

test: check  ## everything that must hold before a commit; the browser tests want `apt-get install chromium`
	$(BIN)/pytest -n auto --dist loadgroup

test-sglang: $(SGLANG_READY)  ## the plugin in a real SGLang server, on a CPU; its warnings are not ours
	$(SGLANG_BIN)/pytest -W ignore --durations 5 tests/sglang

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

$(SGLANG_READY): pyproject.toml tests/sglang/requirements.txt $(SGLANG_BIN)/python
	$(SGLANG_BIN)/pip install --quiet --no-deps --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX) "$(TORCH)"
	$(SGLANG_BIN)/pip install --quiet --no-deps --requirement tests/sglang/requirements.txt
	$(SGLANG_BIN)/pip install --quiet --no-deps --editable .
	@touch $@

$(SGLANG_BIN)/python:
	$(PYTHON) -m venv $(SGLANG_VENV)

clean:
	rm -rf $(VENV) $(SGLANG_VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
