"""Detects that a TCP connection's peer is gone, or accepts no more data."""

from __future__ import annotations

import socket as sockets
import sys
from contextlib import suppress
from typing import Any

from twisted.internet.interfaces import IReactorTime, ITCPTransport

from pipegrid.reactor.deferreds import Timer

_UNACKNOWLEDGED, _UNSENT, _INFO_BYTES = 24, 144, 148
"""The offsets in Linux's ``struct tcp_info`` of packets in flight, and of unsent bytes."""


GONE_S = 30
"""
How long the peer's kernel may acknowledge nothing before a client's connection counts as lost. If a machine
woke up in another network, or a router forgot the connection, nothing ever arrives. The kernel itself
retries for a quarter of an hour, and servers may be silent for a minute, for reasons of their own: half of
that leaves time to connect again.
"""


LOOK_S = 10
STALLED_S = 600
"""
How long it may acknowledge everything but accept no more data, as a server whose disk hangs: it is known to
exist, and other time limits decide how long to wait for it.
"""


def be_prompt(transport: Any, clock: IReactorTime) -> StallWatch:
    """
    Make a client's connection send at once, and detect within ``GONE_S`` that the peer is gone.

    Args:
        transport: TCP, TLS over it, or anything else, which is not changed.

    Returns:
        the watch, to be stopped when the connection is lost.
    """
    if ITCPTransport.providedBy(transport):
        # Small requests must not wait for the acknowledgement of earlier ones.
        transport.setTcpNoDelay(True)
    inner = getattr(transport, "transport", None) or transport
    watch = StallWatch(clock)
    # Other systems, and other transports, lack some of these.
    with suppress(AttributeError, OSError):
        handle = inner.socket  # ``getHandle`` returns OpenSSL's, after TLS was started on it
        handle.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, GONE_S // 3)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, GONE_S // 6)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 4)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, GONE_S * 1000)
        watch.start(handle)
    return watch


class StallWatch:
    """
    Extends the kernel's time limit while the peer acknowledges everything but accepts no more data.

    Since Linux 5.11 TCP_USER_TIMEOUT ends such a connection, too.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._timer = Timer(clock, self._look)
        self._socket: Any = None
        self._time_limit_s = GONE_S

    def start(self, socket: Any) -> None:
        """Start to check this socket periodically."""
        self._socket = socket
        self._timer.set(LOOK_S)

    def stop(self) -> None:
        """Stop, as the connection is lost."""
        self._timer.stop()
        self._socket = None

    def _look(self) -> None:
        with suppress(AttributeError, OSError):
            time_limit_s = STALLED_S if is_stalled(self._socket) else GONE_S
            if time_limit_s != self._time_limit_s:
                option = sockets.TCP_USER_TIMEOUT
                self._socket.setsockopt(sockets.IPPROTO_TCP, option, time_limit_s * 1000)
                self._time_limit_s = time_limit_s
            self._timer.set(LOOK_S)


def is_stalled(socket: Any) -> bool:
    """
    Return whether a TCP socket has unsent data, and none in flight, because the peer accepts no more.

    Raises:
        AttributeError, OSError: unknown.
    """
    info = socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return False  # an old kernel
    unacknowledged, unsent = (
        int.from_bytes(info[at : at + 4], sys.byteorder) for at in (_UNACKNOWLEDGED, _UNSENT)
    )
    return unsent > 0 and not unacknowledged
