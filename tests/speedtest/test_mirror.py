"""``misc/speedtest/mirror``: the archives it makes up, and its tiny mode. No figure is judged."""

from __future__ import annotations

import json
import random
from pathlib import Path

from misc.speedtest import processes
from misc.speedtest.mirror.__main__ import table
from misc.speedtest.mirror.archive import (
    LARGE,
    SMALL,
    SMALL_FILE_BYTES,
    TINY,
    make_archive,
    wrong,
)
from misc.speedtest.mirror.patches import make_index
from misc.speedtest.mirror.runs import Run, ratio, summed_up
from misc.speedtest.mirror.webserver import damaged
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.file_list_format import read_list


class ArchiveTests(SynchronousTestCase):
    """What is mirrored."""

    def test_sizes(self) -> None:
        """As many files and bytes as real archives have, most of them small."""
        for shape in (SMALL, LARGE):
            sizes = shape.sizes()
            self.assertEqual(len(sizes), shape.files)
            self.assertLess(abs(sum(sizes) / shape.size_bytes - 1), 0.001)
            small = sum(size < SMALL_FILE_BYTES for size in sizes) / shape.files
            self.assertTrue(0.83 <= small <= 0.92, (shape, small))

    def test_a_seed_makes_an_archive(self) -> None:
        """The same again from the same seed, and another from another one; the list names it rightly."""
        made = [
            make_archive(Path(self.mktemp()) / "root", TINY, random.Random(seed))
            for seed in (1, 1, 2)
        ]
        self.assertEqual(made[0].packages, made[1].packages)
        self.assertNotEqual(made[0].packages, made[2].packages)
        entries = list(read_list(made[0].list_path.read_bytes().splitlines(), "list"))
        self.assertEqual(
            [(each.path, each.size, each.digest.hex()) for each in entries],
            [(each.path, each.size, each.sha256) for each in made[0].packages],
        )

    def test_what_is_wrong_is_found(self) -> None:
        """Missing, cut and garbled files; a changed archive is another one."""
        archive = make_archive(Path(self.mktemp()) / "root", TINY, random.Random(3))
        paths = [each.path for each in archive.packages[:3]]
        other = damaged(archive.root, Path(self.mktemp()), paths[:1], paths[1:2], paths[2:])
        self.assertEqual(wrong(archive.packages, archive.root), [])
        self.assertEqual(wrong(archive.packages, other), paths)
        changed = archive.change(5, random.Random(4))
        self.assertEqual(wrong(archive.packages, archive.root), [])
        found = wrong(archive.packages, other)
        self.assertLessEqual({each.path for each in changed}, set(found))

    def test_patches_of_an_index(self) -> None:
        """As many as were asked for; that they are right, APT shows in the tiny mode."""
        place = Path(self.mktemp())
        place.mkdir()
        index, made, results = make_index(place, 20_000, 3, 5, random.Random(5))
        self.assertGreaterEqual(index.stat().st_size, 20_000)
        self.assertEqual((len(made), len(set(results))), (3, 3))


class FigureTests(SynchronousTestCase):
    """What is printed."""

    def test_medians(self) -> None:
        """With spread, CPU time and peak; a ratio is one of medians."""
        ours = [Run(seconds, 1.0, "", 1 << 20) for seconds in (1.0, 2.0, 9.0)]
        theirs = [Run(seconds, 1.0, "") for seconds in (6.0, 8.0, 9.0)]
        self.assertEqual(
            summed_up(ours),
            {"median_s": 2.0, "spread_s": [1.0, 9.0], "cpu_s": 1.0, "peak_mib": 1.0},
        )
        self.assertEqual(ratio(theirs, ours), 4.0)

    def test_table(self) -> None:
        """Each tool with its time, its CPU time, and how many times as long it took."""
        found = summed_up([Run(2.0, 1.0, "")])
        text = table([{"what": "a clone", "curl": found, "times_as_fast": {"curl": 4.0}}])
        self.assertIn("curl", text)
        self.assertIn("4.00 x", text)


class TinyTests(SynchronousTestCase):
    """The whole of it, with a real web server."""

    def run_tiny(self, *words: str) -> list[dict[str, object]]:
        """Run some of the measurements; returns their lines."""
        only = [option for word in words for option in ("--only", word)]
        printed = processes.run_module("misc.speedtest.mirror", "--tiny", *only)
        return [json.loads(line) for line in printed.splitlines()]

    def test_clones(self) -> None:
        """Every file arrives by each tool that is installed, with TLS as well."""
        lines = self.run_tiny("small", "tls-small")
        self.assertEqual(len(lines), 2)
        for line in lines:
            self.assertIn("pipegrid", line)
            self.assertEqual(line["failed"], {})

    def test_faults(self) -> None:
        """All is there in the end although a mirror garbles files, or dies."""
        self.assertEqual(len(self.run_tiny("faults")), 2)

    def test_the_rest(self) -> None:
        """What has changed, what is verified again, memory, and patches that APT applies as well."""
        lines = self.run_tiny("incremental", "verify", "memory", "pdiff")
        self.assertEqual(len(lines), 6)
