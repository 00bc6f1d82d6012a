# Needs make and Python 3.11 or newer; the rest is downloaded and cached outside the checkout
# ($REDRIVE_CACHE, else redrive in the user's cache directory).

PYTHON ?= python3
# Arguments for pytest, as in: make test TESTS="tests/unit -k ladder"
TESTS ?= tests
# The same for e2e, as in: make e2e E2E="-k demo"
E2E ?=
# The same for chaos, as in: make chaos CHAOS="-k replay --rounds 10 --messages 100000"
CHAOS ?=
# The same for the soak, as in: make soak SOAK="--minutes 60"
SOAK ?=
# The same for benchmarks, as in: make bench BENCH="-k memory --minutes 30"
BENCH ?=

python := $(PYTHON) .ci/python

.DEFAULT_GOAL := help
.PHONY: help check test bytecode e2e mutants test-brokers test-images e2e-node lint chaos chaos-short soak bench release-check dist site demo sandbox sandbox-down lock

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-20s%s\n", $$1, $$2 }'

# Groups come first, then files in the order of their names: short ones, the unit tests, come last, so no worker
# is idle for long.
test: ## Run lint, build the site, then run all tests against a real broker and API server
	@$(MAKE) --no-print-directory --jobs=3 lint site bytecode
	$(python) -m sandbox prepare
	@echo "Six workers share a broker, an API server and an operator; suites that stop one have their own. Allow 15 minutes on two cores."
	$(python) -m pytest --numprocesses=6 --dist=loadgroup --no-loadscope-reorder --durations=10 $(TESTS)

# In a fresh checkout, each worker would rewrite the assertions of all test modules at the same time:
# 18 seconds of processor time for each of them. If the collection fails, the run of the tests says why.
bytecode:
	@test -d tests/__pycache__ || $(python) -m pytest --collect-only --quiet tests > /dev/null || true

# Suites with a worker and a sandbox of their own come first; the others share a sandbox and a worker.
e2e: ## Run the demo, the tutorial, the package, whole and killed Replays, and what stops or replaces a component (17 minutes)
	$(python) -m sandbox prepare
	$(python) -m pytest -o python_files='e2e_*.py' --numprocesses=3 --dist=loadgroup --no-loadscope-reorder --durations=5 tests $(E2E)

# The tests that use a broker; the Java client and Spark are those of the default release.
test-brokers: ## Run the contract and integration tests against each supported release of Pulsar
	$(python) -m sandbox prepare
	@for release in $$($(python) -c 'from sandbox import versions; print(*versions.PULSARS)'); do \
	  echo "Pulsar $$release"; \
	  $(python) -m pytest --numprocesses=2 --dist=loadgroup --pulsar=$$release tests/contract tests/integration || exit; \
	done

lint: ## Check style, types and the imports between layers
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy operator/redrive release sandbox tests
	$(python) -c 'from importlinter.cli import lint_imports_command as lint; lint()'

check: lint ## Run lint and the unit tests: for every commit, in a few minutes
	$(python) -m pytest --numprocesses=3 --dist=loadfile tests/unit

mutants: ## Break some rules of the product, one at a time, and have the unit test of each fail (10 minutes)
	$(python) -m pytest --numprocesses=2 --dist=loadgroup -o python_files='mutant_*.py' tests/mutants

test-images: ## Build both images by the documented commands and look into them (root, mmdebstrap, buildah)
	$(python) -m pytest -o python_files='image_*.py' -o timeout=1800 --durations=5 tests/images

e2e-node: ## Install and use redrive in the cluster of KUBECONFIG, by the documented commands (see tests/node)
	$(python) -m sandbox prepare
	$(python) -m pytest -o python_files='node_*.py' -o timeout=3600 --durations=5 -rP tests/node

chaos: ## Run the chaos tests in a sandbox of their own (an hour)
	$(python) -m sandbox prepare
	$(python) -m pytest -o python_files='chaos_*.py' -o timeout=900 --durations=10 tests/chaos $(CHAOS)

chaos-short: ## Run some chaos tests, then the soak with each disturbance once (10 minutes)
	$(python) -m sandbox prepare
	$(python) -m pytest -o python_files='chaos_*.py soak_*.py' -o timeout=900 --durations=10 --capture=sys \
	  --minutes=3 -k 'repairs or (fails_once and 409) or as_planned' tests/chaos tests/soak

soak: ## Disturb consumers of all kinds for minutes, and account for every message
	$(python) -m sandbox prepare
	$(python) -m pytest --capture=sys -o python_files='soak_*.py' -o timeout=0 tests/soak $(SOAK)

bench: ## Run the benchmarks in a sandbox of their own (an hour and a half) and print a table
	$(python) -m sandbox prepare
	$(python) -m pytest --full-jit -o python_files='bench_*.py' -o timeout=0 tests/benchmarks $(BENCH)

release-check: ## Run test, chaos, soak, bench, and e2e-node where KUBECONFIG is set; print one table
	@$(python) -m release.check

dist: ## Build the files of a release into dist/: wheel, source, chart, install.yaml, checksums
	$(python) -m release.archives dist

site: ## Build the documentation as a website into dist/site, with warnings as errors
	$(python) -m release.site dist/site

demo: ## Show it: from kubectl apply to a replayed message. With RocketMQ: make demo DEMO=rocketmq
	$(python) -m sandbox.demo $(DEMO)

sandbox: ## Start a sandbox, leave it running, print how to use it
	@$(python) -m sandbox up

sandbox-down: ## Stop the sandbox that `make sandbox` started
	@$(python) -m sandbox down

lock_options = --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
  --upgrade --quiet --custom-compile-command "make lock"

lock: ## Pin the newest dependencies that pyproject.toml allows, of images too
	$(python) -m uv pip compile pyproject.toml --extra dev $(lock_options) --output-file requirements.lock
	$(python) -m uv pip compile pyproject.toml --extra operator --extra cli $(lock_options) \
	  --constraint requirements.lock --output-file images/operator.lock
	$(python) -m uv pip compile pyproject.toml --extra replay $(lock_options) \
	  --constraint requirements.lock --output-file images/replay.lock
	printf 'hatchling\nsetuptools\n' | $(python) -m uv pip compile - $(lock_options) \
	  --constraint requirements.lock --output-file images/build.lock
	printf 'zensical\n' | $(python) -m uv pip compile - $(lock_options) --output-file release/site.lock
	printf 'moto[s3]\nflask\nflask-cors\n' | $(python) -m uv pip compile - $(lock_options) --output-file sandbox/locks/moto.lock
	printf 'rocketmq-python-client\n' | $(python) -m uv pip compile - $(lock_options) --output-file sandbox/locks/rocketmq-client.lock
