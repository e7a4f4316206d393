"""
What a connection can be, what can happen to it, and what it is then.

**Its life.** ``PipelinedConnection._move`` is the only one that changes it; None is what cannot happen.

* It takes requests while it is CONNECTING or READY, and writes them when it is READY.
* CLOSING, it takes no more, and ends when what it owes is answered.
* BROKEN is the same, and the body of the last request written will never be complete: it ends when that
  request's turn to be answered has come.
* LAST_WORDS: the transport is gone, and what it had brought is handed out.
* LEAVING: every request was given back, and the transport was told to go. GONE: it has.

What becomes of requests when something ends early:

====================================  ====================================================================
a request is taken back               unsent: it is gone. Sent: its answer is read and dropped, up to
                                      ``discard_limit_bytes``; beyond, the connection ends. Its body half
                                      sent: nothing more is written, and the connection ends as soon as
                                      the answers before it are in.
a reader pauses                       the transport is paused; what one read had already brought
                                      (256 KiB) is all that is ever held. Does it go on pausing, the
                                      owner asks elsewhere what is new, and after long what stands
                                      behind it as well; that at once, if nobody has claimed the answer
an answer before the whole body       it counts, nothing more is written, and the connection ends
the last answer (Connection: close)   all that stood behind it is as if never sent
loss, garbage, silence                every unanswered request is handed back to the owner with
                                      the error that is true of it
====================================  ====================================================================

**Its reader**, of the answer that is being received (``Valve._move``):

* PAUSED, the transport is paused with it.
* SLOW, it was for so long that new requests had better go elsewhere: the owner is told.
* OVERTAKEN, so do those that were written behind it; the owner is told. It comes to that at once if nobody
  has claimed the answer.
"""

from __future__ import annotations

from pipegrid.states import Named, Table


class Phase(Named):
    """Where a connection is in its life; the module says what each phase means."""

    CONNECTING = "is connecting"
    READY = "is ready"
    CLOSING = "is closing"
    BROKEN = "has broken off a body"
    LAST_WORDS = "hears last words"
    LEAVING = "is leaving"
    GONE = "is gone"


class LifeEvent(Named):
    """What moves a connection from one phase of its life to another."""

    USABLE = "it is usable"
    REFUSES = "it takes no more"
    BREAKS_OFF = "it breaks off a body"
    LOST = "its transport is lost"
    ENDS = "it ends"


class ReaderState(Named):
    """Of the answer that is being received."""

    READS = "reads"
    PAUSED = "pauses"
    SLOW = "is slow"
    OVERTAKEN = "is overtaken"


class Reading(Named):
    """What the reader does, or does not."""

    PAUSES = "it pauses"
    GOES_ON = "it goes on"
    TAKES_LONG = "it takes long"
    NOBODY_CAME = "nobody came for the answer"


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
"""In which requests are accepted."""
TAKES_NO_MORE = frozenset({Phase.CLOSING, Phase.BROKEN})
"""In which only what is owed is waited for."""
HELD_UP = frozenset({ReaderState.SLOW, ReaderState.OVERTAKEN})
"""In which requests had better go elsewhere."""
