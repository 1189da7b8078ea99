# `make serve` and `make test` are all that a newcomer needs; both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: setup serve test check audit bench gpu-check format lock clean

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Tandem needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "cannot make $(VENV); on Debian and Ubuntu: apt-get install python3-venv"; exit 2; }
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	@echo "Installing into $(VENV) ..."
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -r requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

serve: setup
	@$(BIN)/tandem up $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit

# Checks requirements.lock for known vulnerabilities; needs a network.
audit: setup
	$(BIN)/python -m pip_audit -r requirements.lock --no-deps --disable-pip --progress-spinner off

# ARGS=--quick takes less than five minutes.
bench: setup
	$(BIN)/python -m bench.all $(ARGS)

# Runs on a machine with a GPU and its own torch, also without a network: missing packages come from wheels in .whl/.
gpu-check:
	@if ls .whl/*.whl >/dev/null 2>&1; then $(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target .gpu-site .whl/*.whl; fi
	PYTHONPATH=$(CURDIR):$(CURDIR)/.tree:$(CURDIR)/.gpu-site $(PYTHON) -m bench.gpu.check --json $(or $(OUT),bench/results)/gpu_check.json $(ARGS)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: setup
	$(BIN)/uv pip compile --quiet --universal --upgrade --no-emit-index-url --no-header --no-annotate --extra dev --extra ray --extra tracing pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
