"""
What a connection to the GBS server can be, what can happen to it, and what it is then; None: it cannot be.

**Its life**, changed by ``RequestOrder.move`` alone. OPEN, it begins requests. DRAINING, it begins none any
more, answers what it has begun, and closes: the server is stopping, or a request was the last, or what came
is no HTTP. CLOSING, the transport was told to go, and nothing is carried out any more. GONE, there is nobody
left to answer.

**Its turn** (see ``server.turns``), changed by ``TurnTaking._move`` alone. It is in nobody's line, or WAITS
for its turn, or HAS it; who has it and has used it up WAITS_AGAIN, until what it was about to do is over.
"""

from __future__ import annotations

from pipegrid.states import Named, Table


class Life(Named):
    """Where a client's connection is in its life; see the module."""

    OPEN = "is open"
    DRAINING = "is draining"
    CLOSING = "is closing"
    GONE = "is gone"


class ServerEvent(Named):
    """What moves a client's connection on in its life."""

    DRAINS = "it begins no more requests"
    CLOSES = "it closes"
    LOST = "its transport is lost"


class TurnState(Named):
    """Whether it is a connection's."""

    NOT_WANTED = "wants no turn"
    WAITS = "waits for its turn"
    HAS = "has its turn"
    WAITS_AGAIN = "has had its turn and waits for the next"


class Taking(Named):
    """What happens to a connection that may want a turn."""

    IS_GIVEN = "it is its turn"
    STANDS_IN_LINE = "it stands in line"
    IS_OVER = "its turn is over"


def _life() -> Table[Life, ServerEvent]:
    (open_, draining, closing, gone) = Life
    # fmt: off
    return Table("a client's connection", tuple(ServerEvent), {
        #           DRAINS    CLOSES   LOST
        open_:     (draining, closing, gone),
        draining:  (draining, closing, gone),
        closing:   (closing,  None,    gone),
        gone:      (None,     None,    None),
    })
    # fmt: on


def _turn() -> Table[TurnState, Taking]:
    (not_wanted, waits, has, waits_again) = TurnState
    # fmt: off
    return Table("a client's connection", tuple(Taking), {
        #             IS_GIVEN  STANDS_IN_LINE  IS_OVER
        not_wanted:  (has,      waits,          None),
        waits:       (has,      waits,          None),
        has:         (None,     waits_again,    not_wanted),
        waits_again: (None,     waits_again,    waits),
    })
    # fmt: on


LIFE = _life()
TURN = _turn()
