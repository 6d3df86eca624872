# On a fresh machine run `make demo` and `make test`. Each sets up .venv first if necessary.

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: setup demo test check chaos clean

setup: $(STAMP)

$(STAMP): requirements.txt requirements-dev.txt requirements.lock
	@test -x $(PYTHON) || python3 -m venv $(VENV)
	@echo "Installing into $(VENV) (about 6 GB, a minute or two the first time)"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $(STAMP)

demo: setup
	@PYTHON=$(PYTHON) bash demo.sh

check: setup
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

test: check
	@$(PYTHON) -m pytest

chaos: setup
	@$(PYTHON) -m chaos --json outputs/chaos.json; failed=$$?; \
	$(PYTHON) -m chaos.namespaces && $(PYTHON) -m chaos.slurm && exit $$failed

clean:
	rm -rf $(VENV) data/demo models/demo outputs/demo .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
