"""
Time limits that do not depend on what the clock on the wall shows.

Twisted's reactors count with ``time.time``. When that is set back by an hour (by hand, or by a first answer
from a time server), whatever was to happen in five seconds happens in an hour and five seconds: no limit
fires, and a client that waits for a dead server waits on. When it is set forward, all limits fire at once.

``make_monotonic`` has a reactor count with ``time.monotonic``. Our processes call it first of all; a
library must not, for the reactor is its application's, which may take ``reactor.seconds()`` for a date. An
application that wants it calls it itself.

What needs a date asks ``time.time``: leases and their end, files' times, announcements.
"""

from __future__ import annotations

import time

from pipegrid.reactor.standstill import arranged, is_standing

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from typing import Any


def make_monotonic(reactor: Any) -> None:
    """
    Have a reactor of Twisted's count with the monotonic clock from now on; again does nothing.

    Calls that were arranged before come when they would have come. The reactor's thread only, or before it
    runs.

    Args:
        reactor: any that derives from ``ReactorBase``, as all of Twisted's do, asyncio's included.
    """
    if reactor.seconds is time.monotonic or is_standing(reactor):
        return
    shift_s = time.monotonic() - reactor.seconds()
    # The cancelled ones, too: they stand in the same heap.
    for call in arranged(reactor):
        call.time += shift_s
        call.seconds = time.monotonic
    reactor.seconds = time.monotonic
