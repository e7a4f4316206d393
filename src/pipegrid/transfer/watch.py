"""Giving up a server that has been silent for too long, where one call is all there is to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.errors import ServerTimeout
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.silence import last_sign_s
from pipegrid.transfer.worth import StreamWorth

T = TypeVar("T")


class Watch:
    """
    Watches one call.

    Args:
        silence_s: how long the server may give no sign of life, to this call or any other (``silence``).
        more_s: asked when that is over: how much longer, for the time that much data needs.
        worth: of a call that brings a stream: whether that is still worth waiting for.
    """

    def __init__(
        self,
        clock: IReactorTime,
        silence_s: float,
        more_s: Callable[[], float] = lambda: 0.0,
        worth: StreamWorth | None = None,
    ) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._more_s = more_s
        self._worth = worth
        self._last_sign = clock.seconds()
        self._over = False
        self._call: Deferred[Any] | None = None
        self._peer: Peer | None = None
        self._timer: IDelayedCall | None = None

    def sign(self) -> None:
        """The server has given a sign of life: its silence begins anew."""
        self._last_sign = self._clock.seconds()

    async def answer(self, call: Deferred[T], peer: Peer) -> T:
        """
        Return what the call fires with.

        Args:
            peer: whose answer it is.

        Raises:
            ServerTimeout: nothing came for too long, or next to nothing; the call has been cancelled.
        """
        self._call, self._peer = call, peer
        self._look_in(self._silence_s)
        try:
            return await call
        except CancelledError:
            if not self._over:
                raise
            raise ServerTimeout(f"{peer.name} {self._what_it_did()}", peer.name, True) from None
        finally:
            if self._timer is not None and self._timer.active():
                self._timer.cancel()

    def _look_in(self, delay_s: float) -> None:
        self._timer = self._clock.callLater(delay_s, self._look)

    def _look(self) -> None:
        assert self._peer is not None
        sign_s = last_sign_s(self._last_sign, self._peer.last_sign, self._silence_s)
        end_s = sign_s + self._silence_s + self._more_s()
        left_s = end_s - self._clock.seconds()
        if left_s > 0 and (self._worth is None or self._worth.is_worth()):
            self._look_in(left_s)
        elif self._call is not None:
            self._over = True
            self._call.cancel()

    def _what_it_did(self) -> str:
        worth = self._worth
        if worth is None or worth.is_worth():
            return f"was silent for {self._silence_s:g} s"
        return f"sent no more than {worth.came_bytes} bytes in {worth.took_s:.0f} s"
