"""
Reading from the transport, unless the reader of the answer that is being received has had enough.

What its reader is, and what it becomes, is the second table of ``states``; ``_move`` looks it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipegrid.http11.exchange import Exchange
from pipegrid.http11.states import HELD_UP, READER, ReaderState, Reading


class Valve:
    """
    Of one connection.

    Attributes:
        reader: what the reader is.
        held_up: it has paused for so long that requests had better go elsewhere.
    """

    __slots__ = ("_transport", "held_up", "reader")

    def __init__(self) -> None:
        self._transport: Any = None
        self.reader = ReaderState.READS
        self.held_up = False

    def attach(self, transport: Any) -> None:
        """Keep the transport, to pause it and let it go on; called when the connection is made."""
        self._transport = transport

    def _move(self, reading: Reading) -> None:
        self.reader = READER.after(self.reader, reading)
        self.held_up = self.reader in HELD_UP

    def update(self, written: Sequence[Exchange]) -> None:
        """What is first among those that are to be answered, or what its reader wants, may have changed."""
        if self.is_right(written):
            return
        if self.reader is ReaderState.READS:
            self._move(Reading.PAUSES)
            self._transport.pauseProducing()
        else:
            self.open()

    def open(self) -> None:
        """Read on, whatever the reader wants."""
        if self.reader is not ReaderState.READS:
            self._move(Reading.GOES_ON)
            self._transport.resumeProducing()

    def takes_long(self, written: Sequence[Exchange]) -> None:
        """The first one's reader has paused for as long as it may in the state that it is in."""
        self.update(written)
        self._move(Reading.TAKES_LONG if written[0].claimed else Reading.NOBODY_CAME)

    def is_right(self, written: Sequence[Exchange]) -> bool:
        """Whether it is open, or shut, as the reader wants it."""
        reads = not written or not written[0].paused or written[0].abandoned
        return reads == (self.reader is ReaderState.READS)

    def _check_invariants(self, written: Sequence[Exchange]) -> None:
        """For tests, when all that has happened was worked off."""
        assert self.held_up == (self.reader in HELD_UP), self.reader
        assert self.is_right(written) or written[0].response is None, "it reads for who reads"
