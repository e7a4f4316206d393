"""
How long a client may take for what: decided from what it has done and what it is owed, without I/O.

What has been silent for 60 s without being owed an answer is closed, and so are heads and small bodies that
dribble in for longer than that, and clients that for ten minutes took nothing of what they asked for. Who has
not shown the secret has 30 s for everything: for TLS's handshake and a first request, for a head, and for
the body of a request that is refused already.
"""

from __future__ import annotations

from enum import Enum

import attrs

from pipegrid.server.gbs.order import RequestOrder

IDLE_TIMEOUT_S = 60.0
HEAD_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 60.0  # of bodies that are messages; share data only has to keep coming
BODY_BYTES_PER_S = 1000
"""A message that comes at least that fast may take longer: changes of mutable files have share data in it."""
STUCK_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 30.0


class GivenUp(Enum):
    """Why a connection is given up; its value is a clause for the log, if it is worth a line."""

    STUCK = "it takes nothing of what it asked for"
    REQUEST = "its request does not get on"
    REFUSED = "its request was refused, and does not end"
    IDLE = ""


@attrs.define
class Moments:
    """
    When what happened last, by the clock of ``turns``.

    Attributes:
        heard_s: anything came.
        began_s: a request, or the connection, began.
        moved_s: the transport was full, or had room again.
    """

    heard_s: float
    began_s: float
    moved_s: float


def overdue(
    now_s: float, moments: Moments, order: RequestOrder, in_head: bool, queued: bool
) -> GivenUp | None:
    """
    Return why a connection that is not closing has had its time, if it has.

    Args:
        in_head: a head has begun, and is not complete.
        queued: what came waits to be carried out.
    """
    if not order.can_write:
        return GivenUp.STUCK if now_s - moments.moved_s > STUCK_TIMEOUT_S else None
    since_s = now_s - moments.began_s
    if in_head and not queued:
        return GivenUp.REQUEST if since_s > HEAD_TIMEOUT_S else None
    if order.unanswered or queued:
        return None  # we owe it an answer
    if order.receives_message:
        more_s = order.message_bytes / BODY_BYTES_PER_S
        return GivenUp.REQUEST if since_s > BODY_TIMEOUT_S + more_s else None
    if not order.known and order.receiver is not None:
        return GivenUp.REFUSED if since_s > HEAD_TIMEOUT_S else None
    patience_s = IDLE_TIMEOUT_S if order.known else HEAD_TIMEOUT_S
    return GivenUp.IDLE if now_s - moments.heard_s > patience_s else None
