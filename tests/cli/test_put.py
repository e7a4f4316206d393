"""``pipegrid put``: several files, caps in order, failures apart."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import LitCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import UnhappyError
from pipegrid.transfer.put.put_many import MAX_BYTES
from tests.cli.support import BrokenPipe, FakeConfig, FakeGrid, Run, Terminal


class PutTests(SynchronousTestCase):
    """Files in, caps out."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.paths = []
        for name in "abcd":
            path = self.directory / name
            path.write_bytes(name.encode())
            self.paths.append(str(path))

    def caps(self) -> list[str]:
        """The caps of the four files."""
        return [str(LitCap(Path(path).read_bytes())) for path in self.paths]

    def test_caps_on_stdout_one_a_line(self) -> None:
        """Results and nothing else are on stdout, in the order of the arguments."""
        run = Run("put", *self.paths)
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(run.stdout.splitlines(), self.caps())
        self.assertEqual(run.stderr, "")

    def test_order_holds_whatever_finishes_first(self) -> None:
        """A cap waits for those before it, and is printed as soon as they are."""
        grid = FakeGrid(hold=True)
        run = Run("put", *self.paths, grid=grid)
        self.assertEqual(sorted(grid.held), self.paths)  # all at once: they are small
        grid.held[self.paths[2]].callback(None)
        grid.held[self.paths[1]].callback(None)
        self.assertEqual(run.stdout, "")
        grid.held[self.paths[0]].callback(None)
        self.assertEqual(run.stdout.splitlines(), self.caps()[:3])
        self.assertNoResult(run.finished)
        grid.held[self.paths[3]].callback(None)
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(run.stdout.splitlines(), self.caps())

    def test_large_files_go_two_at_a_time(self) -> None:
        """While two large files are under way, a third waits."""
        for path in self.paths:
            with open(path, "wb") as file:
                file.truncate(MAX_BYTES + 1)
        grid = FakeGrid(hold=True)
        run = Run("put", *self.paths, grid=grid)
        self.assertEqual(sorted(grid.held), self.paths[:2])
        grid.held[self.paths[1]].callback(None)
        self.assertEqual(sorted(grid.held), self.paths[:3])
        run.finished.cancel()
        self.successResultOf(run.finished)

    def test_large_files_start_first(self) -> None:
        """They open the windows; the order of the caps is that of the arguments all the same."""
        with open(self.paths[2], "wb") as file:
            file.write(b"larger")
        run = Run("put", *self.paths)
        self.assertEqual(
            [source for source, _ in run.grid.seen],
            [self.paths[2], self.paths[0], self.paths[1], self.paths[3]],
        )
        self.assertEqual(run.stdout.splitlines(), self.caps())

    def test_many_files_need_no_deep_stack(self) -> None:
        """Thousands of files that finish at once are no deeper than two."""
        run = Run("put", *[self.paths[0]] * 3000)
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(run.stdout.count("\n"), 3000)

    def test_one_failed_file_does_not_stop_the_others(self) -> None:
        """The others are stored and printed; the failed one is named; the status is 1."""
        missing = str(self.directory / "missing")
        run = Run("put", self.paths[0], missing, self.paths[1])
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertEqual(run.stdout.splitlines(), self.caps()[:2])
        self.assertEqual(run.stderr.count("\n"), 1)
        self.assertIn(missing, run.stderr)

    def test_json_has_one_object_for_each_argument(self) -> None:
        """Also for the one that failed, so that a script can pair them."""
        missing = str(self.directory / "missing")
        run = Run("put", "--json", self.paths[0], missing)
        self.assertEqual(self.successResultOf(run.finished), 1)
        stored, failed = run.objects
        self.assertEqual(
            stored,
            {
                "path": self.paths[0],
                "cap": self.caps()[0],
                "size": 1,
                "share_bytes": 0,
                "shares_placed": {"0": "alice"},
                "shares_found": {"1": ["bob"]},
                "happiness": 2,
                "elapsed_s": 0.5,
            },
        )
        self.assertEqual(sorted(failed), ["error", "exit_status", "path"])
        self.assertEqual((failed["path"], failed["exit_status"]), (missing, 1))

    def test_too_few_servers_is_3_and_names_the_file(self) -> None:
        """The one status that all failures share is the command's."""
        run = Run("put", *self.paths[:2], grid=FakeGrid(error=UnhappyError("2, not 7", 2, 7)))
        self.assertEqual(self.successResultOf(run.finished), 3)
        self.assertEqual(
            run.stderr.splitlines(), [f"pipegrid: {path}: 2, not 7" for path in self.paths[:2]]
        )

    def test_dash_is_standard_input(self) -> None:
        """What comes in is stored; but only once."""
        run = Run("put", "-", stdin=b"hello")
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(run.stdout, f"{LitCap(b'hello')}\n")
        self.assertEqual(self.successResultOf(Run("put", "-", "-").finished), 2)

    def test_options_reach_the_grid(self) -> None:
        """What is not given comes from the configuration."""
        config = FakeConfig(Params(2, 5, 1000), happy=4)
        for arguments, expected in (
            ((), (Params(2, 5, 1000), 4, None, False)),
            (("-n", "3"), (Params(2, 3, 1000), 3, None, False)),
            (("-n", "3", "--happy", "1"), (Params(2, 3, 1000), 1, None, False)),
            (("-k", "1", "--segment-size", "128KiB"), (Params(1, 5, 1 << 17), 4, None, False)),
            (("--convergence", ""), (Params(2, 5, 1000), 4, b"", False)),
            (("--convergence", "me"), (Params(2, 5, 1000), 4, b"a", False)),
            (("--random-key",), (Params(2, 5, 1000), 4, None, True)),
        ):
            run = Run("put", self.paths[0], *arguments, grid=FakeGrid(config=config))
            self.assertEqual(self.successResultOf(run.finished), 0, run.stderr)
            options = run.grid.seen[0][1]
            names = ("params", "happy", "convergence", "random_key")
            self.assertEqual(tuple(options[name] for name in names), expected)

    def test_sizes(self) -> None:
        """Bytes, powers of 1024 with and without the i, thousands as physicists count, and fractions."""
        for text, size in (
            ("131072", 131072),
            ("128KiB", 131072),
            ("128K", 131072),
            ("1MiB", 1 << 20),
            ("1 m", 1 << 20),
            ("128kB", 128_000),
            ("1MB", 1_000_000),
            ("7B", 7),
            ("1.5M", 3 << 19),
        ):
            run = Run("put", self.paths[0], "--segment-size", text)
            self.assertEqual(run.grid.seen[0][1]["params"].max_segment_bytes, size, text)
        for text in ("", "-1", "0", "1,5M", "1.M", "1X", "K", "1" * 16):
            run = Run("put", self.paths[0], "--segment-size", text)
            self.assertEqual((self.successResultOf(run.finished), run.grid.seen), (2, []))

    def test_impossible_parameters_are_usage(self) -> None:
        """k greater than n is refused before anything is sent."""
        run = Run("put", self.paths[0], "-k", "11")
        self.assertEqual(self.successResultOf(run.finished), 2)
        self.assertEqual(run.grid.seen, [])

    def test_cancelling_cancels_all_and_waits(self) -> None:
        """Ctrl-C stops every upload under way, and starts no other."""
        grid = FakeGrid(hold=True)
        run = Run("put", *self.paths, grid=grid)
        run.finished.cancel()
        self.assertEqual(self.successResultOf(run.finished), 130)
        self.assertEqual(sorted(grid.cancelled), self.paths)

    def test_a_closed_stdout_stops_the_rest(self) -> None:
        """Caps that nobody reads are not worth making: it ends quietly; the same command makes them."""
        grid = FakeGrid(hold=True)
        run = Run("put", *self.paths, grid=grid, stdout=BrokenPipe())
        grid.held[self.paths[0]].callback(None)
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertEqual(sorted(grid.cancelled), self.paths[1:])
        self.assertEqual(run.stderr, "")

    def test_a_bar_appears_on_a_terminal_only(self) -> None:
        """Progress counts acknowledged bytes of all files together."""
        grid = FakeGrid(hold=True)
        run = Run("put", *self.paths[:2], grid=grid, stderr=Terminal())
        for _, options in grid.seen:
            options["progress"](50, 100)
        self.assertIn("put", run.stderr)
        for deferred in grid.held.values():
            deferred.callback(None)
        self.assertEqual(self.successResultOf(run.finished), 0)
        quiet = Run("-q", "put", self.paths[0], stderr=Terminal())
        quiet.grid.seen[0][1]["progress"](50, 100)
        self.assertEqual(quiet.stderr, "")
