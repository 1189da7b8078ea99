# `make serve` starts a cluster, `make test` runs the tests; both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Processes that run tests beside each other. Each file's tests run in one of them.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --progress -o console_output_style=classic -n $(JOBS)

# Tests start hundreds of processes; without .pyc files each of them compiles torch and the rest again.
unexport PYTHONDONTWRITEBYTECODE

# $(call step,TITLE,COMMAND) runs a command and prints a dot every two seconds, then the time it took.
define step
@printf '%s ' $(1); begun=$$(date +%s); \
	(while sleep 2; kill -0 $$$$ 2>/dev/null; do printf .; done) & dots=$$!; \
	$(2); status=$$?; kill $$dots 2>/dev/null; \
	echo " $$(($$(date +%s) - begun)) s"; exit $$status
endef

.PHONY: setup develop serve test test-all test-extended test-alone test-properties test-exhaustive attack soak soak-exact mutants lint lint-types lint-style lint-collects check docs links audit bench coverage release gpu-check gpu-wheels format lock clean

# What serving needs: 6.0 GB on disk, 5.2 of them PyTorch with Triton and the CUDA libraries that PyTorch's wheels bring.
setup: $(VENV)/.installed

# What tests, lint and benchmarks need besides: 0.9 GB more. They install it when they are first used.
develop: $(VENV)/.developed

# Both sets have the versions of requirements.lock, and uv compares the hashes that are there.
$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Tandem needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "cannot make $(VENV); on Debian and Ubuntu: apt-get install python3-venv"; exit 2; }
	$(call step,"1/3 installing uv into $(VENV)",test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv)
	$(call step,"2/3 installing what serving needs",$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -r pyproject.toml -c requirements.lock)
	$(call step,"3/3 installing tandem",$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .)
	@touch $@

$(VENV)/.developed: $(VENV)/.installed
	$(call step,"installing what tests and benchmarks need",$(BIN)/uv pip install --quiet --compile-bytecode --require-hashes --python $(BIN)/python -r requirements.lock)
	@touch $@

serve: setup
	@$(BIN)/tandem up $(ARGS)

# Four to six minutes on two idle cores: all unit and simulation tests, and a representative set of those that start clusters (tests/selection.py).
# With ARGS, the tests that it names: make test ARGS=tests/unit
test: develop
	$(PYTEST) $(or $(ARGS),-m "not extended")

test-all: develop
	$(PYTEST) -m "not alone" $(ARGS)
	$(PYTEST) -n 0 -m alone

# What `make test` leaves out. More schedules, connectors and larger clusters: make test-exhaustive.
test-extended: develop
	$(PYTEST) -m "extended and not exhaustive and not alone" $(ARGS)
	@$(MAKE) --no-print-directory test-alone

# Tests with no other test beside, because they bound how long a client waits beside an attack. Two minutes.
test-alone: develop
	$(PYTEST) -n 0 -m "alone and not exhaustive"

# Property tests with new random examples, ROUNDS times or until one fails. All other targets try the same ones each time.
test-properties: develop
	for round in $$(seq $(or $(ROUNDS),1)); do $(PYTEST) -m "properties and not exhaustive" --hypothesis-profile new $(ARGS) || exit 1; done

# Draws attacks of one client beside a second tenant, and prints those that did harm. ARGS="--minutes 60 --seed 7".
attack: develop
	$(BIN)/python -m tests.security.drawn_attacks $(ARGS)

test-exhaustive: develop
	$(PYTEST) -m exhaustive $(ARGS)

# Simulated clusters, seed after seed, until one breaks a rule. ARGS="--time-s 600" for ten minutes, "--seeds 1-500" for those.
soak: setup
	$(BIN)/tandem simulate --time-s inf $(ARGS)

# Records what a cluster answers under faults, and computes it again alone, bit for bit. Ten minutes; ARGS=--quick for a shorter one.
soak-exact: develop
	$(BIN)/python -m tests.faults.exact_soak $(ARGS)

# Puts 40 random faults into the packages that the simulator runs, each tried on 100 seeds and on its package's unit tests. About half an hour.
mutants: develop
	$(BIN)/python -m tests.mutants.run_mutants $(ARGS)

lint: develop
	@$(MAKE) --no-print-directory --output-sync --keep-going --jobs 2 lint-types lint-style lint-collects

lint-types:
	$(BIN)/mypy

lint-style:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

lint-collects:  # every test module imports
	@found=$$($(BIN)/python -m pytest -n 0 -q --collect-only 2>&1) || { echo "$$found" | tail -30; exit 1; }

check: lint
	$(PYTEST) tests/unit

# The site of docs/ in build/docs. A warning fails it: a broken link or anchor, a page that the navigation lacks.
docs: develop
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs

# Follows the links of docs/ to other hosts; needs a network. Results are in build/links/output.txt.
links: develop
	$(BIN)/python -m sphinx -b linkcheck --keep-going --quiet -d build/doctrees docs build/links

# Checks requirements.lock for known vulnerabilities; needs a network.
audit: develop
	$(BIN)/python -m pip_audit -r requirements.lock --no-deps --disable-pip --progress-spinner off

# ARGS=--quick takes less than five minutes.
bench: develop
	$(BIN)/python -m bench.all $(ARGS)

# Runs on a machine with a GPU and its own torch, also without a network and without an installed distribution: missing
# packages come from the wheels that `make gpu-wheels` has collected. ARGS="--device cpu --quick" tests the script itself.
gpu-check:
	@names=$$(find .whl -type f -name '*.whl' -printf '%f\n' 2>/dev/null | cut -d- -f1 | sort -u); if [ -n "$$names" ]; then \
		echo "installing $$(echo $$names | wc -w) packages from .whl into .gpu-site"; \
		$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target .gpu-site \
			$$(find .whl -type d -printf '--find-links %p ') $$names; fi
	@PYTHONPATH=.gpu-site $(PYTHON) -c 'import sys; from importlib.util import find_spec; \
		missing = [each for each in ("torch", "triton", "msgspec", "psutil", "transformers", "zmq", "locust") if not find_spec(each)]; \
		sys.exit(f"{missing} are missing: copy what make gpu-wheels has put into .whl here; torch must be installed" if missing else 0)'
	PYTHONPATH=$(CURDIR):$(CURDIR)/.tree:$(CURDIR)/.gpu-site $(PYTHON) -m bench.gpu.check --json $(or $(OUT),bench/results)/gpu_check.json $(ARGS)

# Collects those wheels in .whl/1, .whl/2 and so on, less than 64 MiB each; needs a network. ARGS=3.12 only for that Python.
gpu-wheels: develop
	$(BIN)/python -m tools.gpu_wheels .whl $(ARGS)

# Builds the sdist, and the wheel from it; then checks their metadata and serves from the wheel in an empty environment.
release: setup
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/uv tool run --quiet twine@6.2.0 check --strict dist/*
	$(BIN)/python -m tools.installed_wheel dist/*.whl

# Lines of each package that the unit tests run, in their own process: not what the tests that start clusters run.
coverage: develop
	$(PYTEST) --cov --cov-report=term:skip-covered $(or $(ARGS),tests/unit)
	@$(BIN)/coverage report --format=total

format: develop
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The second file is what the image installs: the same versions, without the tools for development. The last command
# writes what `tandem engine install vllm` installs.
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --no-annotate
lock: setup
	$(COMPILE) --upgrade --extra dev --extra docs --extra ray --extra tracing pyproject.toml -o requirements.lock
	$(COMPILE) --extra ray --extra tracing --constraint requirements.lock pyproject.toml -o deploy/docker/requirements.lock
	$(BIN)/python -m tools.engine_locks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
