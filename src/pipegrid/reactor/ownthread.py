"""
Calls from another thread than the reactor's: they would spoil what is under way there.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from twisted.python import threadable

from pipegrid.errors import UsageError


def check_own_thread(what: str) -> None:
    """
    Do nothing in the reactor's own thread, or while no reactor has run yet.

    Args:
        what: it belongs to the reactor, in words.

    Raises:
        UsageError: this is another thread.
    """
    own: Any = threadable.ioThread
    if own is not None and own != get_ident():
        raise UsageError(
            f"{what} can be called from the reactor's own thread only; from another one go through "
            "reactor.callFromThread or twisted.internet.threads.blockingCallFromThread"
        )
