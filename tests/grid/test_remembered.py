"""What a client remembers between processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.grid.client_cache_files import (
    FOUND_NAME,
    LIMITS_NAME,
    MAX_SERVERS,
    BundleLimits,
    open_placement_history,
)
from pipegrid.transfer.put.ask_first_policy import REMEMBERED
from tests.pipes import pipe_in_place


class RememberedTests(SynchronousTestCase):
    """Where its files were found."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()) / "private"

    def test_the_next_process_knows(self) -> None:
        """What one has found elsewhere the next ones ask for first, so many times in all."""
        open_placement_history("auto", [self.directory]).ended(True)
        for _ in range(REMEMBERED):
            process = open_placement_history("auto", [self.directory])
            self.assertTrue(process.must_ask)
            process.ended(False)
        self.assertFalse(open_placement_history("auto", [self.directory]).must_ask)
        self.assertEqual([path.name for path in self.directory.iterdir()], [FOUND_NAME])

    def test_nothing_is_written_without_need(self) -> None:
        """Puts that find nothing leave no file."""
        open_placement_history("auto", [self.directory]).ended(False)
        self.assertFalse(self.directory.exists())

    def test_nonsense_in_the_file(self) -> None:
        """It is as if there were none."""
        self.directory.mkdir(parents=True)
        late = b" " * 2000 + b'{"puts_to_ask_first": 3}'
        for text in (b"", b"[" * 5000, b"[]", b'{"puts_to_ask_first": "x"}', b"\xff", b"{}", late):
            (self.directory / FOUND_NAME).write_bytes(text)
            self.assertFalse(open_placement_history("auto", [self.directory]).must_ask, text[:20])

    def test_a_named_pipe(self) -> None:
        """In the place of the file holds up nobody: it says nothing."""
        with pipe_in_place(self.directory / FOUND_NAME):
            puts = open_placement_history("auto", [self.directory])
            self.assertFalse(puts.must_ask)
            puts.ended(True)
        open_placement_history("auto", [self.directory]).ended(False)

    def test_what_cannot_be_written(self) -> None:
        """A directory that takes no file is no reason to fail."""
        self.directory.parent.mkdir(parents=True)
        self.directory.write_text("no directory")
        puts = open_placement_history("auto", [self.directory])
        puts.ended(True)
        self.assertTrue(puts.must_ask)
        open_placement_history("auto", []).ended(True)


class OffersTests(SynchronousTestCase):
    """Which servers take bundles."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()) / "private"

    def offers(self) -> BundleLimits:
        """Return what a new process knows."""
        return BundleLimits([self.directory])

    def test_the_next_process_knows(self) -> None:
        """What servers have offered, until they refuse it."""
        offers = self.offers()
        offers.heard("a", 1000)
        offers.heard("b", 2000)
        offers.save()
        offers = self.offers()
        self.assertEqual([offers.of(each) for each in "abc"], [1000, 2000, 0])
        offers.heard("a", 0)
        offers.save()
        offers = self.offers()
        self.assertEqual([offers.of(each) for each in "abc"], [0, 2000, 0])

    def test_nothing_is_written_without_need(self) -> None:
        """Nor for what was known before, nor without a directory."""
        for offers in (self.offers(), BundleLimits([])):
            offers.heard("a", 0)
            offers.save()
        self.assertFalse(self.directory.exists())
        offers = self.offers()
        offers.heard("a", 1000)
        offers.save()
        (self.directory / LIMITS_NAME).unlink()
        offers.heard("a", 1000)
        offers.save()
        self.assertFalse((self.directory / LIMITS_NAME).exists())
        BundleLimits([]).heard("a", 1)

    def test_what_servers_take_at_the_end(self) -> None:
        """A server's own last word is saved, whatever was known when it was opened."""
        offers = self.offers()
        offers.heard("b", 5)
        for name, size in (("a", 1000), ("b", 0)):
            offers.note_at_end(name, partial(int, size))
        offers.save()
        self.assertEqual([self.offers().of(each) for each in "ab"], [1000, 0])

    def test_bounds(self) -> None:
        """Of too many servers the oldest are forgotten."""
        offers = self.offers()
        for number in range(MAX_SERVERS + 5):
            offers.heard(f"v0-{number:052}", 1 << 20)
        offers.save()
        offers = self.offers()
        self.assertEqual([offers.of(f"v0-{number:052}") > 0 for number in (4, 5)], [False, True])

    def test_nonsense_in_the_file(self) -> None:
        """It is as if there were none."""
        self.directory.mkdir(parents=True)
        for text in (b"", b"[" * 5000, b"[]", b'{"a": "x"}', b'{"a": true}', b'{"a": -1}', b"\xff"):
            (self.directory / LIMITS_NAME).write_bytes(text)
            self.assertEqual(self.offers().of("a"), 0, text[:20])

    def test_what_cannot_be_written(self) -> None:
        """A directory that takes no file is no reason to fail."""
        self.directory.parent.mkdir(parents=True)
        self.directory.write_text("no directory")
        offers = self.offers()
        offers.heard("a", 1000)
        offers.save()
        with pipe_in_place(self.directory.parent / "pipes" / LIMITS_NAME):
            self.assertEqual(BundleLimits([self.directory.parent / "pipes"]).of("a"), 0)
