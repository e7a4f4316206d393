"""States of a connection and of the reader of its responses; and pauses of reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipegrid.http11.exchange import Exchange
from pipegrid.state_table import Named, Table

# The states of a connection, the events that change them, and the resulting states.


class Phase(Named):
    """
    The phase of a connection.

    ``PipelinedConnection._move`` changes it by the table ``LIFE``, in which None marks an impossible event.

    * CONNECTING and READY: it accepts requests. It writes them when it is READY.
    * CLOSING: it accepts no requests, and ends when the outstanding responses have arrived.
    * BROKEN: like CLOSING; the body of the last written request will never be complete, so the connection
    ends when the response to that request is the next one.
    * LAST_WORDS: the transport is closed, and the bytes that it had received are processed.
    * LEAVING: all requests were returned to the owner, and the transport is closing. GONE: it is closed.

    What happens to requests:

    * A request is withdrawn: if it is not sent yet, it is removed. If it was sent, its response is read and
    discarded, up to ``discard_limit_bytes``; beyond that the connection ends. If half of its body was sent,
    nothing more is written, and the connection ends after the responses to earlier requests.
    * A reader pauses: the transport is paused, and at most the bytes of one read (256 KiB) are kept. If the
    pause goes on, the owner sends new requests on another connection, and later also those that wait for
    this reader. If the response has no reader yet, it does the second at once.
    * The response arrives before the whole body was sent: it is passed on, nothing more is written, and the
    connection ends.
    * A response has ``Connection: close``: later requests count as not sent.
    * Loss, garbage or silence: every unanswered request is returned to the owner with its error.
    """

    CONNECTING = "is connecting"
    READY = "is ready"
    CLOSING = "is closing"
    BROKEN = "has interrupted a body"
    LAST_WORDS = "reads until close"
    LEAVING = "is leaving"
    GONE = "is gone"


class LifeEvent(Named):
    """An event that may change the phase of a connection."""

    USABLE = "it is usable"
    REFUSES = "it accepts no more"
    BREAKS_OFF = "it interrupts a body"
    LOST = "its transport is lost"
    ENDS = "it ends"


class ReaderState(Named):
    """
    The state of the reader of the current response, by the table ``READER``.

    * PAUSED: the transport is paused too.
    * SLOW: its pause is so long that new requests should use another connection; the owner is
    notified.
    * OVERTAKEN: the requests written after it should do so too; the owner is notified. A response without a
    reader gets here at once.
    """

    READS = "reads"
    PAUSED = "pauses"
    SLOW = "is slow"
    OVERTAKEN = "is overtaken"


class Reading(Named):
    """An event that may change the state of a reader."""

    PAUSES = "it pauses"
    GOES_ON = "it continues"
    TAKES_LONG = "it takes long"
    NOBODY_CAME = "the response has no reader"


def _life() -> Table[Phase, LifeEvent]:
    (connecting, ready, closing, broken, last_words, leaving, gone) = Phase
    # fmt: off
    return Table("a connection", tuple(LifeEvent), {
        #             USABLE  REFUSES     BREAKS_OFF  LOST        ENDS
        connecting:  (ready,  closing,    None,       last_words, leaving),
        ready:       (None,   closing,    broken,     last_words, leaving),
        closing:     (None,   closing,    broken,     last_words, leaving),
        broken:      (None,   broken,     None,       last_words, leaving),
        last_words:  (None,   last_words, last_words, None,       gone),
        leaving:     (None,   None,       None,       gone,       None),
        gone:        (None,   None,       None,       None,       None),
    })
    # fmt: on


def _reader() -> Table[ReaderState, Reading]:
    (reads, paused, slow, overtaken) = ReaderState
    # fmt: off
    return Table("a reader", tuple(Reading), {
        #           PAUSES   GOES_ON  TAKES_LONG  NOBODY_CAME
        reads:     (paused,  None,    None,       None),
        paused:    (None,    reads,   slow,       overtaken),
        slow:      (None,    reads,   overtaken,  overtaken),
        overtaken: (None,    reads,   None,       None),
    })
    # fmt: on


LIFE = _life()
READER = _reader()

TAKES_REQUESTS = frozenset({Phase.CONNECTING, Phase.READY})
"""Phases in which requests are accepted."""
TAKES_NO_MORE = frozenset({Phase.CLOSING, Phase.BROKEN})
"""Phases in which only outstanding responses are waited for."""
BLOCKED = frozenset({ReaderState.SLOW, ReaderState.OVERTAKEN})
"""States in which requests should use another connection."""


# Reading from the transport, except while the reader of the current response is paused.


class ReadPause:
    """
    Pauses and resumes the reading of one connection.

    Attributes:
        reader: the state of the current response's reader.
        blocked: whether its pause is so long that requests should use another connection.
    """

    __slots__ = ("_transport", "blocked", "reader")

    def __init__(self) -> None:
        self._transport: Any = None
        self.reader = ReaderState.READS
        self.blocked = False

    def attach(self, transport: Any) -> None:
        """Keep the transport, to pause and resume it; called when the connection is made."""
        self._transport = transport

    def _move(self, reading: Reading) -> None:
        self.reader = READER.after(self.reader, reading)
        self.blocked = self.reader in BLOCKED

    def update(self, written: Sequence[Exchange]) -> None:
        """Pause or resume the transport, after the first unanswered request or its reader has changed."""
        if self.is_right(written):
            return
        if self.reader is ReaderState.READS:
            self._move(Reading.PAUSES)
            self._transport.pauseProducing()
        else:
            self.open()

    def open(self) -> None:
        """Read on, even if the reader is paused."""
        if self.reader is not ReaderState.READS:
            self._move(Reading.GOES_ON)
            self._transport.resumeProducing()

    def takes_long(self, written: Sequence[Exchange]) -> None:
        """The reader of the first response has paused for as long as its state allows."""
        self.update(written)
        self._move(Reading.TAKES_LONG if written[0].claimed else Reading.NOBODY_CAME)

    def is_right(self, written: Sequence[Exchange]) -> bool:
        """Return whether the transport is paused exactly if the reader is."""
        reads = not written or not written[0].paused or written[0].abandoned
        return reads == (self.reader is ReaderState.READS)

    def _check_invariants(self, written: Sequence[Exchange]) -> None:
        """For tests, when all events were processed."""
        assert self.blocked == (self.reader in BLOCKED), self.reader
        assert self.is_right(written) or written[0].response is None, "it reads for a reader"
