"""Waiting for something, but not for ever."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime


async def timeout_or(event: Deferred[Any], timeout_s: float, clock: IReactorTime) -> bool:
    """
    Wait until an event happens, or the time is over; returns whether it happened.

    The event is cancelled when the time is over.
    """
    over = False

    def give_up() -> None:
        nonlocal over
        over = True
        event.cancel()

    timer = clock.callLater(timeout_s, give_up)
    try:
        await event
    except CancelledError:
        if not over:
            raise
        return False
    finally:
        if timer.active():
            timer.cancel()
    return True
