"""What a client remembers between processes."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.grid.placement_history_file import FOUND_NAME, open_placement_history
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
        for text in (b"", b"[" * 5000, b"[]", b'{"puts_to_ask_first": "x"}', b"\xff", b"{}"):
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
