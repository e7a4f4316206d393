"""``pipegrid speedtest``: what the options ask for, and what is refused before anything is started."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import click
from click.testing import CliRunner
from twisted.internet.defer import succeed
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli import speedtest_run
from pipegrid.cli.cmd_speedtest import HOMES, speedtest_command, with_command
from pipegrid.cli.command_grammar import COMMANDS, parse
from pipegrid.cli.command_job import ReactorJob
from pipegrid.cli.console import Console
from pipegrid.core.encoding_parameters import Params
from pipegrid.speedtest import html_report, runner
from pipegrid.speedtest.link_proxies import PROFILES
from pipegrid.speedtest.run_results import SCENARIO, UP, EmulatedLink, Measurement, Run
from pipegrid.speedtest.runner import Settings
from pipegrid.speedtest.targets import ConfiguredGrid, Gateway, PrivateGrid
from tests.cli.support import Run as Command
from tests.speedtest.test_lines import classic_run


class FakeRun:
    """Stands in for ``runner.run``: notes what it is asked for."""

    def __init__(self) -> None:
        self.target: Any = None
        self.settings = Settings()
        self.scenarios: list[str] = []

    def __call__(self, reactor: Any, target: Any, choose: Any, settings: Settings, say: Any) -> Any:
        """Measure nothing."""
        self.target, self.settings = target, settings
        self.scenarios = [each.title for each in choose(target)]
        say("measuring")
        return succeed(classic_run())


class RunTests(SynchronousTestCase):
    """``run``, with and without its name."""

    def setUp(self) -> None:
        self.fake = FakeRun()
        self.patch(runner, "run", self.fake)

    def status(self, *arguments: str) -> tuple[int, Command]:
        """Run ``pipegrid speedtest``; return also the status."""
        done = Command("speedtest", *arguments)
        return self.successResultOf(done.finished), done

    def refused(self, *arguments: str) -> str:
        """Run what is refused; return the sentence."""
        status, done = self.status(*arguments)
        self.assertEqual((status, done.stdout), (2, ""))
        [line] = done.stderr.splitlines()
        return line

    def test_the_private_grid_is_the_default(self) -> None:
        """Ten servers, 3 of 10, five rounds, behind the link called wan; lines come out."""
        status, done = self.status()
        self.assertEqual(status, 0)
        target = self.fake.target
        self.assertIsInstance(target, PrivateGrid)
        self.assertEqual((target.servers, target.transport), (10, "gbs"))
        self.assertEqual((target.params, target.happy), (Params(), 7))
        self.assertEqual(target.link, PROFILES["wan"])
        self.assertEqual(self.fake.settings.rounds, 5)
        self.assertIn("100MB", self.fake.scenarios)
        self.assertIn("upload per-file time: 0.515s  ", done.stdout)
        self.assertIn("measuring", done.stderr)

    def test_options(self) -> None:
        """Each arrives where it belongs."""
        self.status(
            *("run", "--servers", "4", "--transport", "foolscap", "--durability", "none"),
            *("--rtt", "11ms", "--up", "80kB/s", "--down", "520kB/s", "--rounds", "2"),
            *("--window", "50kB", "-k", "2", "--seed", "7", "--only", "1MB"),
        )
        target = self.fake.target
        self.assertEqual(
            (target.servers, target.transport, target.durability), (4, "foolscap", "none")
        )
        self.assertEqual(target.link, EmulatedLink("custom", 0.011, 80e3, 520e3))
        self.assertEqual(target.params, Params(2, 4))
        settings = self.fake.settings
        self.assertEqual((settings.rounds, settings.seed, settings.window_bytes), (2, 7, 50_000))
        self.assertEqual(self.fake.scenarios, ["1MB"])

    def test_what_takes_minutes_is_left_out_unless_named(self) -> None:
        """100 MB over a DSL line: stderr says that it is left out; who names it gets it."""
        _, done = self.status("--link", "dsl")
        self.assertNotIn("100MB", self.fake.scenarios)
        self.assertRegex(done.stderr, "left out.*100MB")
        self.status("--link", "dsl", "--only", "100MB")
        self.assertEqual(self.fake.scenarios, ["100MB"])

    def test_no_link(self) -> None:
        """``--link none`` is the network as it is."""
        self.status("--link", "none")
        self.assertIsNone(self.fake.target.link)

    def test_a_directory_or_a_gateway(self) -> None:
        """-d is that grid; --gateway is that, without sweeps and cold start."""
        self.status("-d", "grid")
        self.assertIsInstance(self.fake.target, ConfiguredGrid)
        self.assertEqual(self.fake.target.directory, Path("grid"))
        self.status("--gateway", "http://127.0.0.1:3456")
        self.assertIsInstance(self.fake.target, Gateway)
        self.assertNotIn("window auto", self.fake.scenarios)
        self.assertNotIn("command 200B", self.fake.scenarios)

    def test_forms(self) -> None:
        """--json is the run on one line; --format chooses others."""
        _, done = self.status("--json")
        self.assertEqual(done.objects[0]["format"], "pipegrid-speedtest")
        _, done = self.status("--format", "json")
        self.assertEqual(json.loads(done.stdout)["format"], "pipegrid-speedtest")
        _, done = self.status("--format", "github-smaller")
        self.assertEqual(json.loads(done.stdout)[0]["unit"], "s")

    def test_contradictions_are_sentences(self) -> None:
        """Status 2, one line, nothing started."""
        for arguments, text in (
            (("-d", "grid", "--rtt", "1ms"), "--rtt is for private grids"),
            (("--gateway", "http://x", "-k", "3"), "--required is for private grids"),
            (("--gateway", "http://x", "-d", "grid"), "choose one of"),
            (("--gateway", "x:3456"), "is not a gateway"),
            (("--link", "none", "--up", "1kB/s"), "--link none emulates no link"),
            (("--link", "carrier-pigeon"), "there is no link called 'carrier-pigeon'"),
            (("--rtt", "soon"), "'soon' is not a round trip"),
            (("-k", "11"), "cannot encode 11 of 10"),
            (("--window", "wide"), "is not a size"),
            (("--only", "1TB"), "there is no scenario '1TB'"),
            (("--responder", "x"), "--responder is for remote ones"),
            (("-d", "grid", "--responder", "x"), "responder"),
            (("--gateway", "http://x", "--only", "window"), "nothing that was chosen"),
            (("--output", "/dev/null/x"), "cannot make /dev/null/x"),
        ):
            self.assertIn(text, self.refused(*arguments), arguments)
        self.assertIn("no such command", self.refused("walk").lower())

    def test_a_report_that_cannot_be_drawn(self) -> None:
        """It is told before anything is measured, and nothing is written."""
        absent: Any = None  # what the import system calls "not there"
        directory = Path(self.mktemp())
        for name, module in html_report.LIBRARIES.items():
            with mock.patch.dict(sys.modules, {module: absent}):
                said = self.refused("--output", str(directory))
            self.assertIn(f"a report needs {name}, which is not installed", said)
        self.assertFalse(directory.exists())

    def test_output_grows_a_history(self) -> None:
        """run.json and report.html are the last run; what measured the same before is its history."""
        seen: list[Any] = []
        self.patch(html_report, "write_report", lambda *given: seen.append(given))
        directory = Path(self.mktemp())
        (directory / "history").mkdir(parents=True)
        (directory / "history" / "20200101T000000Z.json").write_text("{}")
        later = attrs.evolve(classic_run(), when="2027-01-01T00:00:00Z")
        console = Command("speedtest", "--output", str(directory))
        self.successResultOf(console.finished)
        self.assertIn(f"report: {directory}/report.html", console.stderr)
        speedtest_run.write_output(directory, later, _silent())
        histories = [[run.when for run in history] for _, _, history in seen]
        self.assertEqual(histories, [[], [classic_run().when]])
        self.assertEqual(json.loads((directory / "run.json").read_text())["when"], later.when)


def _silent() -> Any:
    class Silent:
        def say(self, text: str) -> None:
            """Nobody listens."""

    return Silent()


class GroupTests(SynchronousTestCase):
    """The group of commands."""

    def test_no_connections_in_advance(self) -> None:
        """They open grids themselves, so nothing connects to a directory's servers before they are run."""
        for line in ([], ["selfcheck"], ["responder"], ["proxy", "1=127.0.0.1:2"]):
            console = Console(None, io.BytesIO(), io.StringIO())
            _, job = parse(["speedtest", "-d", self.mktemp(), *line], console)
            self.assertIsInstance(job, ReactorJob)

    def test_commands_are_loaded_when_named(self) -> None:
        """Each is where the group looks for it."""
        self.assertIn("speedtest", COMMANDS)
        context = click.Context(speedtest_command)
        for name in HOMES:
            found = speedtest_command.get_command(context, name)
            assert found is not None
            self.assertEqual(found.name, name)

    def test_run_is_meant_where_no_command_is_named(self) -> None:
        """Whatever options come first, and whatever their values are called."""
        for given, expected in (
            ([], ["run"]),
            (["--output", "report"], ["run", "--output", "report"]),
            (["-d", "run", "-q", "--only", "x"], ["-d", "run", "-q", "run", "--only", "x"]),
            (["-d", "x", "compare", "a"], ["-d", "x", "compare", "a"]),
            (["--directory=x"], ["--directory=x", "run"]),
            (["--self-check", "-v"], ["selfcheck", "-v"]),
            (["--help"], ["--help"]),
            (["walk"], ["walk"]),
        ):
            self.assertEqual(with_command(given), expected)

    def test_help_names_all(self) -> None:
        """``pipegrid speedtest --help`` is of the group."""
        shown = CliRunner().invoke(speedtest_command, ["--help"], obj=None).output
        for name in HOMES:
            self.assertIn(name, shown)


class ResultsTests(SynchronousTestCase):
    """``compare`` and ``report``."""

    def write(self, run: Run) -> str:
        """Return the name of a file with a run."""
        path = Path(self.mktemp())
        path.write_text(run.as_json())
        return str(path)

    def comparable(self, scale: float) -> str:
        """Return a run with enough rounds to be judged."""
        samples = [scale * (1 + 0.001 * number) for number in range(8)]
        measured = Measurement("1MB", SCENARIO, UP, 1, 10**6, 0, samples)
        return self.write(attrs.evolve(classic_run(), measurements=(measured,)))

    def test_a_regression_is_told(self) -> None:
        """In words, and by the status if that is asked for; not between equal runs."""
        fast, slow = self.comparable(1.0), self.comparable(2.0)
        for arguments, status, text in (
            ((fast, slow), 0, "slower"),
            ((fast, slow, "--fail-on-regression"), 1, "slower"),
            ((fast, fast, "--fail-on-regression"), 0, "No change"),
        ):
            done = Command("speedtest", "compare", *arguments)
            self.assertEqual(self.successResultOf(done.finished), status, done.stderr)
            self.assertIn(text, done.stdout)

    def test_what_is_no_run(self) -> None:
        """Missing, something else, of another version: a sentence each, status 1 or 2."""
        other = Path(self.mktemp())
        other.write_text('{"format": "pipegrid-speedtest", "version": 99}')
        for path, status, text in (
            ("nowhere.json", 1, "cannot read nowhere.json"),
            (__file__, 2, "is not JSON"),
            (str(other), 2, "is of version 99"),
        ):
            done = Command("speedtest", "report", path)
            self.assertEqual(self.successResultOf(done.finished), status)
            self.assertIn(text, done.stderr)
