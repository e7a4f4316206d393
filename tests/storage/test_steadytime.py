"""When the clock is believed where shares would be removed."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.storage.lease_check_log import (
    HELD_S,
    MAX_NOTE_BYTES,
    MOST_APART_S,
    NOTE_NAME,
    LeaseCheckLog,
    NonDecreasingDate,
    look,
    next_look,
)
from tests.pipes import pipe_in_place
from tests.storage.support import NOW

DAY_S = 86400


class LooksTests(SynchronousTestCase):
    """What is made of one note and the time."""

    def held(self, *times: float) -> list[float]:
        """Return for how many days nothing is removed, after each look."""
        looks, found = None, []
        for now in times:
            looks = next_look(looks, now)
            found.append(looks.held_s / DAY_S)
        return found

    def test_regular_looks(self) -> None:
        """After a week of them leases are believed, and stay so."""
        days = [NOW + day * DAY_S for day in range(10)]
        self.assertEqual(self.held(*days), [7, 6, 5, 4, 3, 2, 1, 0, 0, 0])

    def test_what_begins_anew(self) -> None:
        """A long absence, a jump ahead, and a clock that is set back, each holds for a week."""
        steady = LeaseCheckLog(NOW - 100 * DAY_S, NOW)
        for now in (NOW + MOST_APART_S + 1, NOW + 365 * DAY_S, NOW - 1):
            self.assertEqual(next_look(steady, now).held_s, HELD_S)
        self.assertEqual(next_look(steady, NOW + MOST_APART_S).held_s, 0)


class NoteTests(SynchronousTestCase):
    """The note in a storage directory."""

    def setUp(self) -> None:
        self.storage = Path(self.mktemp())
        self.storage.mkdir(parents=True)

    def test_it_is_kept(self) -> None:
        """The next process goes on with it."""
        look(self.storage, NOW)
        self.assertEqual(look(self.storage, NOW + DAY_S), LeaseCheckLog(NOW, NOW + DAY_S))

    def test_damaged(self) -> None:
        """What is no note counts as none, also if it is endless."""
        for text in (
            "",
            "[]",
            "{}",
            '{"since_s": 2, "last_s": 1}',
            '{"since_s": "1", "last_s": 1}',
        ):
            (self.storage / NOTE_NAME).write_text(text)
            self.assertEqual(look(self.storage, NOW), LeaseCheckLog(NOW, NOW))
        for data in (b"\xff\x00", b"[" * 100_000, b" " * MAX_NOTE_BYTES + b'{"since_s": 1}'):
            (self.storage / NOTE_NAME).write_bytes(data)
            self.assertEqual(look(self.storage, NOW), LeaseCheckLog(NOW, NOW))

    def test_a_date_is_no_date(self) -> None:
        """What was believed is a date that leases can have, or it counts for nothing."""
        for believed in ("1e999", "NaN", "-1", "5000000000", '"x"', "null", "[1]"):
            note = f'{{"since_s": {NOW}, "last_s": {NOW}, "believed_s": {believed}}}'
            (self.storage / NOTE_NAME).write_text(note)
            self.assertEqual(NonDecreasingDate(self.storage, lambda: 5.0, lambda: 0.0)(), 5)

    def test_a_named_pipe(self) -> None:
        """In its place counts as none, and holds up nobody."""
        with pipe_in_place(self.storage / NOTE_NAME):
            self.assertEqual(look(self.storage, NOW), LeaseCheckLog(NOW, NOW))
            self.assertEqual(look(self.storage, NOW + DAY_S), LeaseCheckLog(NOW, NOW + DAY_S))
