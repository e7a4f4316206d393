"""Every way to fail is one sentence and one exit status."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path

import click
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.error_report import ExitStatus, sentence
from pipegrid.cli.options import byte_rate, byte_size, byte_space
from pipegrid.errors import (
    CapError,
    CorruptionError,
    NotEnoughSharesError,
    ServerUnreachable,
    SinkError,
    SourceError,
    UnhappyError,
    UsageError,
)
from tests.cli.support import BrokenPipe, FakeGrid, Run


class ExitStatusTests(SynchronousTestCase):
    """A script tells failures apart by their status."""

    ERRORS = (
        (UsageError("that cannot be"), 2),
        (CapError("no cap"), 2),
        (UnhappyError("two servers, not seven", 2, 7), 3),
        (NotEnoughSharesError("two shares, not three", 2, 3), 4),
        (CorruptionError("a hash disagrees", 1, 36, "alice"), 5),
        (SourceError("cannot read it"), 1),
        (SinkError("cannot write it"), 1),
        (ServerUnreachable("alice is gone"), 1),
        (PermissionError(13, "Permission denied", "secret"), 1),
        (ZeroDivisionError("by accident"), 1),
    )

    def test_each_error_has_its_status(self) -> None:
        """The class of an error decides the status, and nothing is printed on stdout."""
        for error, status in self.ERRORS:
            run = Run("status", grid=FakeGrid(error=error))
            self.assertEqual((error, self.successResultOf(run.finished)), (error, status))
            self.assertEqual(run.stdout, "")

    def test_each_error_is_one_sentence(self) -> None:
        """Stderr gets one line, with the error's own words."""
        for error, _ in self.ERRORS:
            run = Run("status", grid=FakeGrid(error=error))
            self.assertEqual(run.stderr.count("\n"), 1, run.stderr)
            self.assertIn(error.args[-1], run.stderr)
            self.assertNotIn("Traceback", run.stderr)

    def test_tracebacks_only_with_v(self) -> None:
        """-v, before or after the command, shows where it happened."""
        for arguments in (("-v", "status"), ("status", "-v")):
            run = Run(*arguments, grid=FakeGrid(error=ZeroDivisionError("by accident")))
            self.assertEqual(self.successResultOf(run.finished), 1)
            self.assertIn("Traceback", run.stderr)

    def test_unforeseen_errors_advise_v(self) -> None:
        """An error that nobody foresaw says how to learn more."""
        self.assertIn("with -v", sentence(ZeroDivisionError("by accident")))

    def test_json_failures_are_objects(self) -> None:
        """Under --json a failure is an object on stdout too, for scripts that read only that."""
        run = Run("--json", "status", grid=FakeGrid(error=UnhappyError("two, not seven", 2, 7)))
        self.assertEqual(self.successResultOf(run.finished), 3)
        self.assertEqual(run.objects, [{"error": "two, not seven", "exit_status": 3}])

    def test_the_grid_is_closed_after_success_and_failure(self) -> None:
        """Whatever happens, connections are given up."""
        for error in (None, UsageError("no")):
            grid = FakeGrid(error=error)
            self.successResultOf(Run("status", grid=grid).finished)
            self.assertTrue(grid.closed)

    def test_cancelling_is_130(self) -> None:
        """Ctrl-C stops the work, closes the grid, and is told apart from failure."""
        grid = FakeGrid(hold=True)
        run = Run("status", grid=grid)
        self.assertNoResult(run.finished)
        run.finished.cancel()
        self.assertEqual(self.successResultOf(run.finished), ExitStatus.INTERRUPTED)
        self.assertEqual(grid.cancelled, ["status"])
        self.assertTrue(grid.closed)
        self.assertIn("interrupted", run.stderr)

    def test_a_trace_is_written(self) -> None:
        """--trace gives the grid a tracer, and its file is whole JSON when the command ends."""
        path = self.mktemp()
        grid = FakeGrid()
        run = Run("--trace", path, "status", grid=grid)
        self.successResultOf(run.finished)
        self.assertIsNotNone(grid.tracer)
        self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
        link = self.mktemp()
        os.symlink(path, link)
        self.assertIn("symbolic link", Run("--trace", link, "status").stderr)
        with open(path, "rb") as file:
            self.assertEqual(json.load(file), [])
        run = Run("--trace", "/dev/full", "status", grid=FakeGrid())
        self.assertIn("cannot write the trace to /dev/full: No space left", run.stderr)
        run = Run("--trace", os.path.join(path, "no"), "status")
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertIn("cannot write the trace", run.stderr)

    def test_a_new_local_grid_is_announced(self) -> None:
        """A grid that was made because none was configured is told of on stderr, unless quiet."""
        created = "made a local grid"
        self.assertIn(created, Run("status", grid=FakeGrid(created=created)).stderr)
        self.assertEqual(Run("-q", "status", grid=FakeGrid(created=created)).stderr, "")

    def test_servers_that_cannot_be_used_are_named(self) -> None:
        """A server that is skipped is told on stderr, with the reason, and the command goes on."""
        warnings = ("server 'x' is skipped: it has no address",)
        self.assertIn(warnings[0], Run("status", grid=FakeGrid(warnings=warnings)).stderr)


class UsageTests(SynchronousTestCase):
    """A command line that makes no sense is status 2 and one sentence."""

    def test_usage_errors(self) -> None:
        """What is wrong is said, and where help is."""
        for arguments, words in (
            (("put",), "Missing argument"),
            (
                ("fetch",),
                "No such command 'fetch'; did you mean 'pipegrid get'? See 'pipegrid --help'",
            ),
            (("pt", "x"), "did you mean 'pipegrid put'?"),
            (("create-alias", "home"), "did you mean 'pipegrid alias create'?"),
            (("alias", "lst"), "did you mean 'pipegrid alias list'?"),
            (("xyzzy",), "No such command 'xyzzy'; see"),
            (
                ("put", "--limit-rate", "1Mbit/s", "x"),
                "not a number of bytes per second, such as 500kB",
            ),
            (("put", "--segment-size", "many", "x"), "'many' is not a size"),
            (("put", "--segment-size", "0", "x"), "'0' is not a size"),
            (("put", "--convergence", "not!", "x"), "base32"),
            (("put", "-k", "0", "x"), "-k"),
            (("put", "-k", "three", "x"), "'three' is not a whole number"),
            (("mirror", "verify", "--sample", "x", "."), "'x' is not a number"),
            (("-q", "-v", "status"), "choose one of -q and -v"),
            (("get", "URI:LIT:", "--force"), "needs -o"),
        ):
            run = Run(*arguments)
            self.assertEqual((arguments, self.successResultOf(run.finished)), (arguments, 2))
            self.assertIn(words, run.stderr)
            self.assertIn("--help", run.stderr)
            self.assertEqual(run.stderr.count("\n"), 1)

    def test_sizes(self) -> None:
        """Units as programs and people write them, with a fraction or not; a rate may say of what."""
        for text, size in (("131072", 131072), ("1.5M", 3 << 19), ("0.5kB", 500), ("2 KiB", 2048)):
            self.assertEqual(byte_size(text), size)
            self.assertEqual(byte_rate(f"{text}/s"), size)
        self.assertEqual((byte_space("0"), byte_space("1K")), (0, 1024))
        for text in ("0", "0.0M", "1,5M", "1.M", "-1", "1e6", "1.2345M", "0.5", "1/s"):
            self.assertRaises(click.BadParameter, byte_size, text)

    def test_an_alias_without_its_colon(self) -> None:
        """What is no local file, and an alias, is asked back about before anything is done."""
        home = Path(self.mktemp())
        (home / "private").mkdir(parents=True)
        (home / "private" / "aliases").write_text("home: URI:DIR2-LIT:\n")
        for words in (
            ("put", __file__, "home"),
            ("cp", __file__, "home"),
            ("cp", "home", __file__),
        ):
            run = Run("-d", str(home), *words)
            self.assertEqual(self.successResultOf(run.finished), 2, words)
            self.assertIn("there is no file 'home'; did you mean 'home:'?", run.stderr)
            self.assertEqual(run.grid.seen, [])

    def test_key_options_exclude_each_other(self) -> None:
        """A random key and a convergence secret are one too many."""
        for command in (("put", "x"), ("encode", "x", "--shares", "y")):
            run = Run(*command, "--random-key", "--convergence", "")
            self.assertEqual(self.successResultOf(run.finished), 2)
            self.assertIn("only one", run.stderr)


class HelpTests(SynchronousTestCase):
    """What ``--help`` says."""

    def test_a_command_for_it(self) -> None:
        """``help``, and ``help`` of a command, are what other programs have."""
        for asked, meant in (
            (("help",), ("--help",)),
            (("help", "put"), ("put", "--help")),
            (("help", "alias", "add"), ("alias", "add", "--help")),
        ):
            shown = []
            for words in (asked, meant):
                with redirect_stdout(StringIO()) as stdout:  # click writes past the console
                    self.assertEqual(self.successResultOf(Run(*words).finished), 0)
                shown.append(stdout.getvalue())
            self.assertIn("Usage: ", shown[0])
            self.assertEqual(*shown)

    def help(self, *arguments: str) -> str:
        """Return the help with each text on one line."""
        code = "from pipegrid.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments, "--help"],
            env={**os.environ, "PYTHONPATH": ":".join(sys.path), "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return " ".join(done.stdout.split())

    def test_summaries_are_whole(self) -> None:
        """No command's is cut off."""
        for arguments, heading in (((), "Files:"), (("speedtest",), "Commands:")):
            _, found, summaries = self.help(*arguments).partition(heading)
            self.assertEqual(found, heading)
            self.assertNotIn("...", summaries)
        self.assertIn("its round-trip time and its free space.", self.help())

    def test_numbers_say_of_what_and_which_default(self) -> None:
        """For each command that encodes."""
        for command in ("init", "put", "encode"):
            shown = self.help(command)
            for words in (
                "How many of a file's shares restore it; the rest may be lost. [default: the directory",
                "How many shares to make of a file, at most one for each server. "
                "[default: the directory's; 10 in",
            ):
                self.assertIn(words, shown)
        for command in ("init", "put"):
            words = "servers must each hold a share of their own before a file counts as stored. [default:"
            self.assertIn(words, self.help(command))


class ClosedStdoutTests(SynchronousTestCase):
    """Nobody reads the results."""

    def test_a_reader_that_has_seen_enough_is_no_reason_for_words(self) -> None:
        """``pipegrid get CAP | head -c1`` ends quietly, with a status that is not 0."""
        run = Run("get", "URI:LIT:krugkidro5ugc5a", stdout=BrokenPipe())
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertEqual(run.stderr, "")
        self.assertTrue(run.grid.closed)

    def test_no_stdout_at_all_is_told(self) -> None:
        """``>&-`` is a mistake, and gets its sentence."""
        from pipegrid.cli.console import ResultStream

        with self.assertRaises(SinkError) as caught:
            ResultStream(None).write(b"x")
        self.assertIn("standard output is closed", str(caught.exception))

    def test_a_stream_that_was_closed_before(self) -> None:
        """When Python takes all apart, in any order, there is nothing to hand over, and nothing to tell."""
        from pipegrid.cli.console import ResultStream

        stream = BytesIO()
        results = ResultStream(stream)
        results.write(b"x")
        stream.close()
        results.close()
        self.assertTrue(results.closed)


class StartUpTests(SynchronousTestCase):
    """The shell waits for imports, so only what a command needs is imported."""

    def test_version_imports_nothing_of_weight(self) -> None:
        """``pipegrid --version`` loads neither click nor Twisted nor anything else of size."""
        loaded = self._loaded("--version")
        for heavy in ("click", "twisted", "attr", "importlib.metadata", "argparse", "logging"):
            self.assertNotIn(heavy, loaded)

    def test_help_imports_only_click(self) -> None:
        """Neither help nor a usage error waits for Twisted."""
        for arguments in ("--help", "put --help", "nosuch"):
            loaded = self._loaded(*arguments.split())
            self.assertIn("click", loaded)
            for heavy in ("twisted", "attr", "importlib.metadata", "zfec", "Crypto", "tqdm"):
                self.assertNotIn(heavy, loaded, arguments)

    def _loaded(self, *arguments: str) -> set[str]:
        code = (
            "import sys, atexit\n"
            "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
            "from pipegrid.cli import main\n"
            "main()\n"
        )
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                "-c",
                f"import sys; sys.path[:0] = {sys.path!r}\n{code}",
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        return set(done.stderr.split())
