"""
What becomes of one share at one server.

    state        what happens                                              and then
    open         the server has all of it                                  stored
                 it refuses; has other bytes; is gone                      refused; lost; failed
                 it knows no unfinished share                              doubtful
                 all is sent and answered, and it wants more               doubtful
    doubtful     all is answered; it did not grant the share               refused
                 it lists the share; it does not                           stored; lost
                 it does not, and said before that it had a part           open, to send that part after all
    any of both  taken back; somebody else stored it                       dropped; found
"""

from __future__ import annotations

from enum import Enum

from twisted.internet.defer import CancelledError

from pipegrid.errors import ConflictingWrite, NoSuchShare, ServerRefused


class State(str, Enum):
    """What becomes of the share at this server; the table above says how."""

    OPEN = "open"
    DOUBTFUL = "doubtful"  # whether the server has it, or any of it
    STORED = "stored"
    FOUND = "found"  # somebody else stored it meanwhile
    REFUSED = "refused"
    LOST = "lost"  # the server forgot it, or has other bytes
    FAILED = "failed"  # the server is gone
    DROPPED = "dropped"


def state_after(error: BaseException | None) -> State:
    """Return what state a failed call puts a share in."""
    if isinstance(error, CancelledError):
        return State.DROPPED
    if isinstance(error, NoSuchShare):
        return State.DOUBTFUL
    if isinstance(error, ConflictingWrite):
        return State.LOST  # whoever looks at it has the server forget what it has
    return State.REFUSED if isinstance(error, ServerRefused) else State.FAILED


def is_unexplained(state: State, error: BaseException | None) -> bool:
    """Return whether the server refused a share, and did not say why."""
    return state is State.REFUSED and (error is None or isinstance(error, NoSuchShare))
