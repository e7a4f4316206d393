# `make demo` shows the main job on a real file; `make test` runs every check.

# The fastest there is, or what the caller wants: `make test PYTHON=python3.13`. It is chosen once, when it is first
# needed, and handed on: another measurement may come out differently.
ifeq ($(origin PYTHON),undefined)
PYTHON = $(eval PYTHON := $(shell sh misc/fastest-python.sh))$(PYTHON)
endif
VENV := .venv
# What trial runs: `make trial TESTS="tests.core tests.cli.test_put"`.
TESTS := tests
LIMIT_S := 1500
# The other Pythons that are promised; those that are not installed are told of, and left out.
PYTHONS := python3.10 python3.11 python3.12 python3.13 python3.14
BIN := $(VENV)/bin
PROGRAM := $(VENV)/.program
INSTALLED := $(VENV)/.installed

TAHOE_VENV := .venv-tahoe
TAHOE := $(CURDIR)/$(TAHOE_VENV)/bin/tahoe
BUILDBOT_VENV := .venv-buildbot
MIRROR_VENV := .venv-mirror-peers

INTEROP := $(addprefix tests.interop.,tahoe_matrix mutable_matrix mutable_shares mutable_trips wrong_inputs foolscap_grid gateway_grids gateway_replace gateway_returns round_trips storing_again)

# All that is installed in an environment but libraries' own tests, which are half of it and which nobody runs. One file or
# the other is for other Pythons and cannot be compiled, which `pip` does not mind either.
compile = $(1)/bin/python -m compileall -qq -x '/(tests?|SelfTest)/' $(1)/lib/python3*/site-packages >/dev/null 2>&1 || true

install = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile \
	$(if $(LOWEST),--constraint $(VENV)/constraints.txt) --editable

.PHONY: demo test lint types trial coverage pythons prerequisites lowest newest attack interop peers peers-mutable mirror-peers mirror-world speedtest budgets links builds soak large-mutable crash durability buildbot fuzz manpage format trees fresh clean

# What the targets need of the system: all that is missing is installed in one step, before anything in parallel, or
# is listed. The table is in misc/prerequisites.py.
prerequisites:
	@command -v $(PYTHON) >/dev/null || { echo "PipeGrid needs Python 3.10 or later with its module venv (on Debian:" \
		"python3 and python3-venv); another than $(PYTHON) can be named: make PYTHON=python3.10" >&2; false; }
	@test -n "$(CHECKED)" || $(PYTHON) misc/prerequisites.py $(or $(MAKECMDGOALS),$(.DEFAULT_GOAL))

demo: $(PROGRAM)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh misc/demo.sh

# Two environments are made side by side: each is the work of one core. So is checking types, for most of a minute on
# a fresh checkout, so tests run meanwhile; what it finds is said once more at the end, from what it remembers.
test: $(PROGRAM)
	@$(MAKE) -j 2 CHECKED=1 PYTHON="$(PYTHON)" lint $(TAHOE_VENV)/.installed
	@$(MAKE) -j 2 CHECKED=1 PYTHON="$(PYTHON)" types trial || \
		{ $(MAKE) CHECKED=1 PYTHON="$(PYTHON)" types; false; }

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

# No test may hang: trial's own timeout is 120 s a test, this one is for the whole, on a machine that is busy.
# A machine that does much else may be given more: `make test LIMIT_S=5000`.
# Three processes, for two cores: a sixth of the time is waiting, for a real disk, a rate that is limited, a process.
# Some run beside Tahoe-LAFS's own processes, which have an environment of their own and are forked from one that has
# imported what they stand on (tests/forked). What tests start writes no bytecode, and would compile all that it imports
# each time; so would trial's own processes where the environment forbids bytecode.
trial: $(INSTALLED) $(TAHOE_VENV)/.installed
	$(BIN)/python -m compileall -q src misc tests
	timeout $(LIMIT_S) $(BIN)/python tests/forked/around.py $(TAHOE) \
		$(BIN)/python -m twisted.trial -j 3 --temp-directory=_trial_temp $(TESTS)

# The same tests (`make pythons TESTS=tests.cli PYTHONS=python3.13`: fewer) with other Pythons, each in an environment of
# its own; Tahoe-LAFS keeps the one that it has.
pythons: $(TAHOE_VENV)/.installed
	@found=; for each in $(PYTHONS); do \
		$$each -c "import venv" 2>/dev/null || { echo "$$each is not installed, and not tried." >&2; continue; }; \
		found=1; $(MAKE) PYTHON=$$each VENV=$(VENV)-$${each##*/} TESTS="$(TESTS)" trial || exit 1; done; \
		test -n "$$found" || { echo "None of $(PYTHONS) is installed." >&2; false; }

# The same tests with the oldest of every dependency that setup.cfg permits. Twisted's does not run on Python 3.13 and
# later: `make lowest PYTHON=python3.11`.
lowest: $(TAHOE_VENV)/.installed
	$(MAKE) PYTHON=$(PYTHON) VENV=$(VENV)-lowest LOWEST=1 TESTS="$(TESTS)" trial

# The same with the newest of every dependency that setup.cfg permits, whatever was installed before.
newest:
	rm -rf $(VENV)-newest
	$(MAKE) PYTHON=$(PYTHON) VENV=$(VENV)-newest TESTS="$(TESTS)" trial

# The same tests, half as long again, and which lines and branches none of them came to.
coverage:
	$(BIN)/coverage erase
	MEASURE_COVERAGE=1 $(MAKE) trial
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# Under five minutes, on a machine that does nothing else. What the figures mean: docs/explanation-speedtest.md.
# Results add up to a history there; `make speedtest RUN="--link dsl"` measures something else.
speedtest: $(INSTALLED)
	$(BIN)/pipegrid speedtest run --output speedtest-results $(RUN)

# Round trips of small files and the share of TLS's rate for large ones, one JSON line each; four minutes.
budgets: $(INSTALLED)
	$(BIN)/python -m misc.speedtest.grid

# What the speed test must show on emulated links; a quarter of an hour.
links: $(INSTALLED)
	$(BIN)/python -m misc.speedtest.links_check

# Ten equal runs in a row, and one of a build that was slowed: does `compare` tell them apart? Twelve minutes.
builds: $(INSTALLED)
	$(BIN)/python -m misc.speedtest.builds_check

# Enemies of a storage server, one after the other; at most ten minutes, on a machine that does nothing else, files on a
# rested disk or in memory (`TMPDIR=/dev/shm make attack`).
# `make attack ATTACK="--only slow_bodies --seconds 100"` runs one; docs/reference-security.md.
attack: $(INSTALLED)
	$(BIN)/python -m misc.attack $(ATTACK)

# Random and long (about ten minutes); a seed is printed. `make soak SEED=7` repeats one.
soak: $(INSTALLED)
	$(BIN)/python -m misc.soak $(if $(SEED),--seed $(SEED))

# A gigabyte of MDMF in memory (3.4 GB of shares), a kilobyte of it changed, every byte counted: three minutes.
large-mutable: $(INSTALLED)
	$(BIN)/python -m misc.soak.large_mutable --scratch /dev/shm $(if $(SEED),--seed $(SEED))

# Cuts off file systems of its own in mid-run, so it needs root. docs/reference-durability.md
crash: $(INSTALLED)
	$(BIN)/python -m misc.soak.crash $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m misc.soak.crash_mirror $(if $(SEED),--seed $(SEED))

# On the disk that the working copy is on; with libeatmydata (Debian: libeatmydata1) there is a floor, too.
durability: $(INSTALLED)
	mkdir -p speedtest-results
	$(BIN)/python -m misc.speedtest.durability --scratch speedtest-results \
		--json speedtest-results/durability.json --chart speedtest-results/durability.svg

# The build step on a real master and worker, through a real browser (two minutes); docs/how-to-buildbot.md.
buildbot: $(BUILDBOT_VENV)/.installed
	timeout -s INT 900 $(BUILDBOT_VENV)/bin/python -m twisted.trial --temp-directory=_trial_temp_buildbot \
		tests.interop.buildbot_master

$(BUILDBOT_VENV)/.installed: setup.cfg pyproject.toml | prerequisites
	$(PYTHON) -m venv $(BUILDBOT_VENV)
	$(BUILDBOT_VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[buildbot,speedtest]' 'hypothesis >= 6.90'
	touch $(BUILDBOT_VENV)/.installed

# Each target for so many seconds; docs/how-to-fuzz.md. What it once found, `make test` replays.
fuzz: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python -m misc.fuzz --seconds $(or $(SECONDS),600)

# All of what `make test` does a little of: some hour and a half, and 2 GB of memory for all the processes. CELLS: mutable_matrix.
interop: $(INSTALLED) $(TAHOE_VENV)/.installed
	TAHOE=$(TAHOE) timeout 7200 $(BIN)/python -m twisted.trial --temp-directory=_trial_temp_interop $(INTEROP)
	TAHOE=$(TAHOE) timeout 3600 $(BIN)/python -m misc.soak.restarts $(if $(SEED),--seed $(SEED))
	TAHOE=$(TAHOE) timeout 3600 $(BIN)/python -m misc.soak.crowds $(if $(SEED),--seed $(SEED))
	TAHOE=$(TAHOE) timeout 3600 $(BIN)/python -m misc.soak.resume --kind tahoe $(if $(SEED),--seed $(SEED))
	TAHOE=$(TAHOE) timeout 3600 $(BIN)/python -m misc.soak.writers --gateways $(if $(SEED),--seed $(SEED))

# PipeGrid and Tahoe-LAFS's gateway in turns on the same servers, on a machine that does nothing else.
peers: $(INSTALLED) $(TAHOE_VENV)/.installed
	TAHOE=$(TAHOE) $(BIN)/python -m misc.speedtest.peers

# Repositories by the programs that make them (reprepro, aptly, apt-ftparchive, createrepo_c and others), mirrored, and read by
# apt and dnf, as the repositories themselves are; five minutes. `make mirror-world WORLD="rpm-xz debian-flat"`: these alone.
mirror-world: $(INSTALLED)
	$(BIN)/python -m misc.mirror_world $(WORLD)

# The same of mutable files and directories, five minutes: `make peers-mutable RUN="--only overwrite"` measures less.
peers-mutable: $(INSTALLED) $(TAHOE_VENV)/.installed
	TAHOE=$(TAHOE) $(BIN)/python -m misc.speedtest.peers.mutables $(RUN)

# Whole trees, PipeGrid and Tahoe-LAFS's commands in turns: two hours and more, of which Tahoe-LAFS takes nearly all,
# or a quarter of that with `make trees TREES="--rounds 1 --peer-files 100"`. Then small files a second;
# `make trees MANY="--beside DIR"` measures another checkout in turns.
trees: $(INSTALLED) $(TAHOE_VENV)/.installed
	TAHOE=$(TAHOE) $(BIN)/python -m misc.speedtest.trees $(TREES)
	$(BIN)/python -m misc.speedtest.many --files 10000 $(MANY)

# Mirroring tools, in turns on the same web servers; half an hour, on a machine that does nothing else.
mirror-peers: $(INSTALLED) $(MIRROR_VENV)/.installed
	timeout 600 $(BIN)/python -m twisted.trial --temp-directory=_trial_temp_peers tests.interop.debmirror \
		tests.interop.reposync
	APT_MIRROR2=$(MIRROR_VENV)/bin/apt-mirror $(BIN)/python -m misc.speedtest.mirror

$(MIRROR_VENV)/.installed: | prerequisites
	$(PYTHON) -m venv $(MIRROR_VENV)
	$(MIRROR_VENV)/bin/pip install --quiet --disable-pip-version-check apt-mirror==16
	touch $(MIRROR_VENV)/.installed

$(TAHOE_VENV)/.installed: | prerequisites
	$(PYTHON) -m venv $(TAHOE_VENV)
	$(TAHOE_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile tahoe-lafs==1.20.0
	$(call compile,$(TAHOE_VENV))
	touch $(TAHOE_VENV)/.installed

# `make test` tells when it is not current.
manpage: $(INSTALLED)
	$(BIN)/python -m pipegrid.cli.manpage > man/pipegrid.1

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The program alone, which is a fifth of what the tests need.
$(PROGRAM): setup.cfg pyproject.toml | prerequisites
	$(PYTHON) -m venv $(VENV)
	$(if $(LOWEST),$(PYTHON) -m misc.lowest mirror speedtest > $(VENV)/constraints.txt)
	$(install) .
	$(call compile,$(VENV))
	touch $(PROGRAM)

$(INSTALLED): $(PROGRAM)
	$(install) '.[test]'
	$(call compile,$(VENV))
	touch $(INSTALLED)

# `make demo` and `make test` as on a machine that has nothing else yet: a bare Debian in a directory of its own, with
# this machine's settings of apt and pip. Needs root, and takes half an hour; `make fresh TESTS=tests.cli` runs fewer
# tests, `make fresh SUITE=trixie` takes another Debian.
fresh: | prerequisites
	$(PYTHON) misc/fresh.py --tests "$(TESTS)" $(if $(SUITE),--suite $(SUITE))

clean:
	rm -rf $(VENV) $(VENV)-python3.* $(VENV)-lowest $(VENV)-newest $(TAHOE_VENV) $(BUILDBOT_VENV) $(MIRROR_VENV) _trial_temp* .coverage .coverage.* .mypy_cache .ruff_cache .hypothesis fuzz-results speedtest-results
