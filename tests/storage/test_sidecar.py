"""The note beside an unfinished upload."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.storage.uploads import incoming_files as sidecar

NOTE = sidecar.Note(b"b" * 16, b"s" * 32, 77, 1 << 40, ((0, 5), (9, 1 << 39)))


class NoteTests(SynchronousTestCase):
    """Notes survive, or are no notes."""

    def test_a_note_is_read_back(self) -> None:
        """What was packed is parsed, whatever an older, longer note left behind it."""
        self.assertEqual(sidecar.parse_note(NOTE.pack()), NOTE)
        self.assertEqual(sidecar.parse_note(NOTE.pack() + b"left over"), NOTE)

    def test_a_torn_note_is_no_note(self) -> None:
        """Any prefix, and any changed byte, is refused."""
        packed = NOTE.pack()
        for length in range(len(packed)):
            self.assertRaises(ValueError, sidecar.parse_note, packed[:length])
        for at in range(len(packed)):
            torn = packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]
            self.assertRaises(ValueError, sidecar.parse_note, torn)

    def test_a_note_fits_in_a_page(self) -> None:
        """Ranges beyond the bound are left out; the rest is still believed."""
        ranges = tuple((n, n + 1) for n in range(0, 2000, 2))
        packed = attrs.evolve(NOTE, ranges=ranges).pack()
        self.assertLessEqual(len(packed), 4096)
        self.assertEqual(sidecar.parse_note(packed).ranges, ranges[: sidecar.MAX_NOTED_RANGES])

    def test_the_secret_does_not_show(self) -> None:
        """A note's repr has nothing of the secret in it."""
        self.assertNotIn("sss", repr(NOTE))
