# What can be done here. Needs make and a Python of 3.11 or newer; the rest is fetched and cached
# outside of the checkout ($REDRIVE_CACHE, else redrive in the user's cache directory).

PYTHON ?= python3
# Arguments for pytest, as in: make test TESTS="tests/unit -k ladder"
TESTS ?= tests
# The same of chaos, as in: make chaos CHAOS="-k killed"
CHAOS ?=
# The same of benchmarks, as in: make bench BENCH="-k memory --minutes 30"
BENCH ?=

python := $(PYTHON) .ci/python

.DEFAULT_GOAL := help
.PHONY: help test lint chaos bench demo sandbox sandbox-down lock

help: ## Say what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-20s%s\n", $$1, $$2 }'

# In the order of their names: what is short, the unit tests, comes last, and no worker waits for long.
test: lint ## Prove it: lint, then all tests against real parts
	$(python) -m sandbox prepare
	$(python) -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=10 $(TESTS)

lint: ## Check style, types and which layer imports which
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy operator/redrive sandbox tests
	$(python) -c 'from importlinter.cli import lint_imports_command as lint; lint()'

chaos: ## Disturb it in every way, on parts of its own: takes a quarter of an hour
	$(python) -m sandbox prepare
	$(python) -m pytest -o python_files='chaos_*.py' -o timeout=900 --durations=10 tests/chaos $(CHAOS)

bench: ## Measure it, on parts of its own: takes half an hour; a table in the end
	$(python) -m sandbox prepare
	$(python) -m pytest -o python_files='bench_*.py' -o timeout=0 tests/benchmarks $(BENCH)

demo: ## See it: from kubectl apply to a replayed message
	$(python) -m sandbox.demo

sandbox: ## Start real parts, leave them running, say how to use them
	@$(python) -m sandbox up

sandbox-down: ## Stop what `make sandbox` started
	@$(python) -m sandbox down

lock: ## Pin the newest dependencies that pyproject.toml allows
	$(python) -m uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-annotate --upgrade --quiet \
	  --custom-compile-command "make lock" --output-file requirements.lock
