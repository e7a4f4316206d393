# `make demo` shows the main job on a real file; `make test` runs every check.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

TAHOE_VENV := .venv-tahoe
TAHOE := $(CURDIR)/$(TAHOE_VENV)/bin/tahoe

INTEROP := $(addprefix tests.interop.,tahoe_matrix wrong_inputs foolscap_grid)

.PHONY: demo test lint types trial interop speedtest soak fuzz format clean

demo: $(INSTALLED)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh misc/demo.sh

test: lint types trial

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

# No test may outlive its welcome: trial's own timeout is 120 s a test, this one is for the whole.
# Some run beside Tahoe-LAFS's own processes, which have an environment of their own.
trial: $(INSTALLED) $(TAHOE_VENV)/.installed
	$(BIN)/coverage erase
	TAHOE=$(TAHOE) timeout 540 $(BIN)/coverage run -m twisted.trial --temp-directory=_trial_temp tests
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# Some four minutes; on a machine that does nothing else. What the figures mean: docs/reference-speed.md.
speedtest: $(INSTALLED)
	$(BIN)/python -m misc.speedtest.grid

# Random and long (about ten minutes); a seed is printed. `make soak SEED=7` repeats one.
soak: $(INSTALLED)
	$(BIN)/python -m misc.soak $(if $(SEED),--seed $(SEED))

# Each target for so many seconds; docs/how-to-fuzz.md. What it once found, `make test` replays.
fuzz: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python -m misc.fuzz --seconds $(or $(SECONDS),600)

# All of what `make test` does a little of: some ten minutes, and 2 GB of memory for all the processes.
interop: $(INSTALLED) $(TAHOE_VENV)/.installed
	TAHOE=$(TAHOE) timeout 1800 $(BIN)/python -m twisted.trial --temp-directory=_trial_temp_interop $(INTEROP)

$(TAHOE_VENV)/.installed:
	$(PYTHON) -m venv $(TAHOE_VENV)
	$(TAHOE_VENV)/bin/pip install --quiet --disable-pip-version-check tahoe-lafs==1.20.0
	touch $(TAHOE_VENV)/.installed

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) $(TAHOE_VENV) _trial_temp* .coverage .coverage.* .mypy_cache .ruff_cache .hypothesis fuzz-results
