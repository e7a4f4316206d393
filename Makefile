# `make demo` shows the main job on a real file; `make test` runs every check.

# The fastest there is, or what the caller wants: `make test PYTHON=python3.13`. It is chosen once, when it is first
# needed, and handed on: another measurement may come out differently.
ifeq ($(origin PYTHON),undefined)
PYTHON = $(eval PYTHON := $(shell sh misc/fastest-python.sh))$(PYTHON)
endif
VENV := .venv
# What trial runs: `make trial TESTS="tests.core tests.cli.test_put"`.
TESTS := tests
LIMIT_S := 2400
# The other Pythons that are promised; those that are not installed are told of, and left out.
PYTHONS := python3.10 python3.11 python3.12 python3.13 python3.14
BIN := $(VENV)/bin
PROGRAM := $(VENV)/.program
INSTALLED := $(VENV)/.installed

TAHOE_VENV := .venv-tahoe
TAHOE := $(CURDIR)/$(TAHOE_VENV)/bin/tahoe
BUILDBOT_VENV := .venv-buildbot
MIRROR_VENV := .venv-mirror-peers
MAGIC_FOLDER_VENV := .venv-magic-folder

# All that is installed in an environment but libraries' own tests, which are half of it and which nobody runs. One file or
# the other is for other Pythons and cannot be compiled, which `pip` does not mind either.
compile = $(1)/bin/python -m compileall -qq -x '/(tests?|SelfTest)/' $(1)/lib/python3*/site-packages >/dev/null 2>&1 || true

install = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile \
	$(if $(LOWEST),--constraint $(VENV)/constraints.txt) --editable

# What measures and soaks: `make links`, or `python -m misc.speedtest.links_check`. ARGS are its options; RECORD=1
# appends what it measures to docs/figures.json. Several modules run one after the other. CONTRIBUTING.md lists all.
ARGS :=
measure.attack := misc.attack ## enemies of a storage server; at most ten minutes
measure.backups := misc.speedtest.backups ## pipegrid backup and restic in turns; five minutes
measure.budgets := misc.speedtest.grid ## round trips of small files, rate of large ones; four minutes
measure.builds := misc.speedtest.builds_check ## does compare tell builds apart? twelve minutes
measure.cold := misc.speedtest.cold ## a command from its start to its end; one minute
measure.crash := misc.soak.crash misc.soak.crash_mirror ## power cuts; needs root
measure.durability := misc.speedtest.durability ## what durability costs on this disk
measure.gateway-clients := misc.soak.gateway_clients ## 8 GB through a gateway, and many bad clients; twenty minutes
measure.gateways := misc.speedtest.gateways ## our gateway and Tahoe-LAFS's in turns; half an hour
measure.interop := misc.soak.restarts misc.soak.crowds misc.soak.resume misc.soak.writers ## all with Tahoe-LAFS; an hour and a half
measure.large-mutable := misc.soak.large_mutable ## a kilobyte of a gigabyte of MDMF; three minutes
measure.links := misc.speedtest.links_check ## emulated links; a quarter of an hour
measure.many := misc.speedtest.many ## small files a second; ARGS="--beside DIR" compares
measure.mirror := misc.speedtest.mirror ## mirroring tools in turns; half an hour
measure.mirror-world := misc.mirror_world ## repositories of real programs, read by apt and dnf; five minutes
measure.mount := misc.soak.mount ## a mounted gigabyte over 100 ms, and get in turns; ten minutes
measure.peers := misc.speedtest.peers ## Tahoe-LAFS's gateway in turns
measure.peers-mutable := misc.speedtest.peers.mutables ## the same of mutable files; five minutes
measure.restic := misc.restic misc.speedtest.restic ## restic's tasks, and its speed with rclone in turns; eight minutes
measure.sftp := misc.sftp ## a gateway's SFTP: sshfs, rclone, git, 10,000 files; half an hour
measure.soak := misc.soak ## random and long; ten minutes
measure.speedtest := pipegrid ## the speed test with a report; five minutes
measure.trees := misc.speedtest.trees ## whole trees, Tahoe-LAFS in turns; two hours

args.misc.soak.large_mutable := --scratch /dev/shm
args.misc.soak.resume := --kind tahoe
args.misc.soak.writers := --gateways
args.misc.speedtest.durability := --scratch speedtest-results --json speedtest-results/durability.json \
	--chart speedtest-results/durability.svg
args.misc.speedtest.many := --files 10000
args.pipegrid := speedtest run --output speedtest-results

# What trial runs before.
tests.interop := $(addprefix tests.interop.,introducer_grid onion_services tahoe_matrix mutable_matrix mutable_shares mutable_trips wrong_inputs foolscap_grid gateway_grids gateway_replace gateway_returns recorded_web_api round_trips storing_again tahoe_commands)
tests.mirror := tests.interop.debmirror tests.interop.reposync

MEASURE := attack backups budgets builds cold crash durability gateway-clients gateways interop large-mutable links many mirror mirror-world mount peers peers-mutable restic sftp soak speedtest trees

.DEFAULT_GOAL := help
.PHONY: help run-module demo test lint types trial coverage pythons prerequisites lowest newest attack backups budgets builds cold crash durability gateway-clients gateways interop large-mutable links many mirror mirror-world mount peers peers-mutable restic sftp soak speedtest trees buildbot magic-folder fuzz manpage format fresh clean

help: ## this list
	@sed -n -E -e 's/^measure\.([a-z-]+) :=.*## (.*)/\1\t\2/p' -e 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 16

# What the targets need of the system: all that is missing is installed in one step, before anything in parallel, or
# is listed. The table is in misc/prerequisites.py.
prerequisites:
	@command -v $(PYTHON) >/dev/null || { echo "PipeGrid needs Python 3.10 or later with its module venv (on Debian:" \
		"python3 and python3-venv); another than $(PYTHON) can be named: make PYTHON=python3.10" >&2; false; }
	@test -n "$(CHECKED)" || $(PYTHON) misc/prerequisites.py $(or $(MAKECMDGOALS),$(.DEFAULT_GOAL))

demo: $(PROGRAM) ## store a real file, lose seven of ten directories, get it back
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh misc/demo.sh

# Two environments are made side by side: each is the work of one core. So is checking types, for most of a minute on
# a fresh checkout, so tests run meanwhile; what it finds is said once more at the end, from what it remembers.
test: $(PROGRAM) ## every test, linter, types; installs what is missing if it may
	@$(MAKE) -j 2 CHECKED=1 PYTHON="$(PYTHON)" lint $(TAHOE_VENV)/.installed
	@$(MAKE) -j 2 CHECKED=1 PYTHON="$(PYTHON)" types trial || \
		{ $(MAKE) CHECKED=1 PYTHON="$(PYTHON)" types; false; }

lint: $(INSTALLED) ## formatter and linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED) ## type checker
	$(BIN)/mypy

# No test may hang: trial's own timeout is 120 s a test, this one is for the whole, on a machine that is busy.
# A machine that does much else may be given more: `make test LIMIT_S=5000`.
# Three processes, for two cores: a sixth of the time is waiting, for a real disk, a rate that is limited, a process.
# Some run beside Tahoe-LAFS's own processes, which have an environment of their own and are forked from one that has
# imported what they stand on (tests/forked). What tests start writes no bytecode, and would compile all that it imports
# each time; so would trial's own processes where the environment forbids bytecode.
trial: $(INSTALLED) $(TAHOE_VENV)/.installed ## tests alone; TESTS="tests.core tests.cli.test_put"
	$(BIN)/python -m compileall -q src misc tests
	timeout $(LIMIT_S) $(BIN)/python tests/forked/around.py $(TAHOE) \
		$(BIN)/python -m twisted.trial -j 3 --temp-directory=_trial_temp $(TESTS)

# The same tests (`make pythons TESTS=tests.cli PYTHONS=python3.13`: fewer) with other Pythons, each in an environment of
# its own; Tahoe-LAFS keeps the one that it has.
pythons: $(TAHOE_VENV)/.installed ## tests on all Pythons; PYTHONS=python3.13
	@found=; for each in $(PYTHONS); do \
		$$each -c "import venv" 2>/dev/null || { echo "$$each is not installed, and not tried." >&2; continue; }; \
		found=1; $(MAKE) PYTHON=$$each VENV=$(VENV)-$${each##*/} TESTS="$(TESTS)" trial || exit 1; done; \
		test -n "$$found" || { echo "None of $(PYTHONS) is installed." >&2; false; }

# The same tests with the oldest of every dependency that setup.cfg permits. Twisted's does not run on Python 3.13 and
# later: `make lowest PYTHON=python3.11`.
lowest: $(TAHOE_VENV)/.installed ## tests with the oldest dependencies; PYTHON=python3.11
	$(MAKE) PYTHON=$(PYTHON) VENV=$(VENV)-lowest LOWEST=1 TESTS="$(TESTS)" trial

# The same with the newest of every dependency that setup.cfg permits, whatever was installed before.
newest: ## tests with the newest dependencies
	rm -rf $(VENV)-newest
	$(MAKE) PYTHON=$(PYTHON) VENV=$(VENV)-newest TESTS="$(TESTS)" trial

# The same tests, half as long again, and which lines and branches none of them came to.
coverage: ## tests, and the lines that none reaches
	$(BIN)/coverage erase
	MEASURE_COVERAGE=1 $(MAKE) trial
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

$(MEASURE): $(INSTALLED)
	@mkdir -p speedtest-results
	$(if $(tests.$@),TAHOE=$(TAHOE) timeout 7200 $(BIN)/python -m twisted.trial --temp-directory=_trial_temp_$@ $(tests.$@))
	set -e; for each in $(measure.$@); do $(MAKE) --no-print-directory CHECKED=1 MODULE=$$each run-module; done

# One of these, with its own options.
run-module:
	TAHOE=$(TAHOE) APT_MIRROR2=$(MIRROR_VENV)/bin/apt-mirror $(BIN)/python -m $(if $(RECORD),misc.figures --record) $(MODULE) \
		$(args.$(MODULE)) $(ARGS)

interop peers peers-mutable trees: $(TAHOE_VENV)/.installed
mirror: $(MIRROR_VENV)/.installed

# Its last release does not run on later Twisteds.
magic-folder: $(INSTALLED) $(MAGIC_FOLDER_VENV)/.installed ## two folders of magic-folder on two gateways; three minutes
	timeout -s INT 900 $(BIN)/python -m twisted.trial --temp-directory=_trial_temp_magic tests.interop.magic_folders

$(MAGIC_FOLDER_VENV)/.installed: | prerequisites
	$(PYTHON) -m venv $(MAGIC_FOLDER_VENV)
	$(MAGIC_FOLDER_VENV)/bin/pip install --quiet --disable-pip-version-check magic-folder==24.3.0 twisted==24.3.0
	touch $(MAGIC_FOLDER_VENV)/.installed

# The build step on a real master and worker, through a real browser (two minutes); docs/how-to-buildbot.md.
buildbot: $(BUILDBOT_VENV)/.installed ## the build step on a real master and worker; two minutes
	timeout -s INT 900 $(BUILDBOT_VENV)/bin/python -m twisted.trial --temp-directory=_trial_temp_buildbot \
		tests.interop.buildbot_master

$(BUILDBOT_VENV)/.installed: setup.cfg pyproject.toml | prerequisites
	$(PYTHON) -m venv $(BUILDBOT_VENV)
	$(BUILDBOT_VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[buildbot,speedtest]' 'hypothesis >= 6.90'
	touch $(BUILDBOT_VENV)/.installed

# Each target for so many seconds; docs/how-to-fuzz.md. What it once found, `make test` replays.
fuzz: $(INSTALLED) ## each fuzz target for ten minutes; SECONDS=60
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python -m misc.fuzz --seconds $(or $(SECONDS),600)

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
manpage: $(INSTALLED) ## write man/pipegrid.1
	$(BIN)/python -m pipegrid.cli.manpage > man/pipegrid.1

format: $(INSTALLED) ## format and fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The program alone, which is a fifth of what the tests need.
$(PROGRAM): setup.cfg pyproject.toml | prerequisites
	$(PYTHON) -m venv $(VENV)
	$(if $(LOWEST),$(PYTHON) -m misc.lowest gateway invite mirror mount speedtest tor > $(VENV)/constraints.txt)
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
fresh: | prerequisites ## demo and test on a bare Debian; needs root, half an hour
	$(PYTHON) misc/fresh.py --tests "$(TESTS)" $(if $(SUITE),--suite $(SUITE))

clean: ## environments and results
	rm -rf $(VENV) $(VENV)-python3.* $(VENV)-lowest $(VENV)-newest $(TAHOE_VENV) $(BUILDBOT_VENV) $(MIRROR_VENV) $(MAGIC_FOLDER_VENV) _trial_temp* .coverage .coverage.* .mypy_cache .ruff_cache .hypothesis fuzz-results speedtest-results
