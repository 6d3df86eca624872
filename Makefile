# Two commands on a fresh machine: `make demo` and `make test`. Each sets up .venv first if necessary.
#   make setup        .venv with the locked packages
#   make demo         download, train, evaluate and predict on a small sample
#   make demo-recipes  the four systems in recipes/ in small; DEVICE=cuda: on one GPU, with times and memory of a step in fp32, bf16, fp16
#   make format       format the code and fix what ruff can fix
#   make check        ruff, import-linter, size and mypy
#   make size         tokens of each part beside its budget
#   make test         check, and every test
#   make test-quick   check, then the tests that start no whole command: run it while you work
#   make gpu          prove and measure the GPU path (docs/research/gpu.md); DEVICE=cpu: a dry run; PYTHON=python3: without .venv
#   make chaos        attacks on real trainings (docs/research/reliability.md)
#   make release     a wheel in dist/, if CHANGELOG.md names its version and the wheel works in a new environment
#   make clean        remove .venv, the output of the demo, and caches

VENV := .venv
GIVEN_PYTHON := $(PYTHON)
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
JOBS ?= 2
MARKED := not alone
NO_TESTS := 5# pytest: all of an extra have another marker
RUNNING := .pytest_cache/running-tests
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.PHONY: setup demo demo-recipes format check size test side-by-side test-quick gpu chaos release clean

setup: $(STAMP)

$(STAMP): requirements.txt requirements-dev.txt requirements-export.txt requirements-mlflow.txt requirements-geo.txt requirements-s3.txt $(wildcard recipes/*/requirements.txt) requirements.lock
	@test -x $(PYTHON) || python3 -m venv $(VENV)
	@echo "Installing into $(VENV) (8 GB, 5 of them for CUDA; a minute or two the first time)"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $(STAMP)

demo: setup
	@PYTHON=$(PYTHON) bash demo.sh

demo-recipes: setup
	@set -e; for recipe in training_engine compressed_ad crowd_bt underwater_ir; do \
		echo; echo "== recipes/$$recipe"; PYTHON=$(abspath $(PYTHON)) bash recipes/$$recipe/demo.sh; done

format: setup
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

check: setup
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/lint-imports --no-logo
	@$(PYTHON) .ci/size.py
	@$(VENV)/bin/mypy

# Most tests run side by side, and beside ruff and mypy; those that measure or time (marker `alone`) run after them, one at a
# time.
test: setup
	@$(MAKE) --no-print-directory -j 2 check side-by-side; failed=$$?; \
	TESTED=tests $(PYTHON) -m pytest -m alone tests && exit $$failed

# The tests of the core run as if there were no yolo_seg_ddp/extras/, those of each extra as if there were no other: tests/support/plugin.py
# reads TESTED. If pytest itself is killed, RUNNING names the tests that ran: the plugin writes it, and removes it at the end.
side-by-side: setup
	@mkdir -p $(dir $(RUNNING)); rm -f $(RUNNING); \
	TESTED="tests recipes" RUNNING_FILE=$(RUNNING) $(PYTHON) -m pytest $(SIDE_BY_SIDE) -m "$(MARKED)" tests recipes; failed=$$?; \
	if test -e $(RUNNING); then echo "pytest ended early, with code $$failed:"; cat $(RUNNING); fi >&2; \
	printf '%s\n' $(wildcard yolo_seg_ddp/extras/*/tests) | xargs -P $(JOBS) --process-slot-var=SLOT -I {} sh -c '$(TEST_AN_EXTRA)' || failed=1; exit $$failed

# Two extras at a time, each in one process, which starts faster than two; what one prints stays together.
TEST_AN_EXTRA = said=$$(TESTED={} $(PYTHON) -m pytest -m "$(MARKED)" {} 2>&1); code=$$?; echo "$$said"; \
	test $$code = 0 || test $$code = $(NO_TESTS)

test-quick: check
	@$(MAKE) --no-print-directory side-by-side MARKED="not slow and not alone"; failed=$$?; \
	TESTED=tests $(PYTHON) -m pytest -m "alone and not slow" tests && exit $$failed

# With PYTHON given nothing is installed: WHEELS=folder brings packages that it lacks. ARGS are further options.
gpu: $(if $(GIVEN_PYTHON),,setup)
	@$(or $(GIVEN_PYTHON),$(PYTHON)) -m benchmarks.gpu --device $(or $(DEVICE),auto) $(ARGS)

chaos: setup
	@$(PYTHON) -m pytest tests/chaos -m chaos -o junit_family=xunit1 --junitxml=outputs/chaos.xml $(ARGS)

size:
	@python3 .ci/size.py

release: setup
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); grep -q "^## $$version, " CHANGELOG.md || \
		{ echo "CHANGELOG.md has no heading '## $$version, DATE': write what changed, or correct the version in pyproject.toml" >&2; exit 1; }
	@$(PYTHON) -m pytest tests/commands/test_python.py -k wheel
	@$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf $(VENV) data/demo models/demo models/demo-windows outputs/demo outputs/recipes .mypy_cache .ruff_cache .import_linter_cache .pytest_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
