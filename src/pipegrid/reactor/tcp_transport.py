"""
Twisted's TCP transports: large reads, immediate sends and back-pressure for bulk data, and detection of a
peer that is gone or accepts no more data.
"""

from __future__ import annotations

import socket as sockets
import sys
from contextlib import suppress
from typing import Any, Protocol

from twisted.internet.interfaces import IPushProducer, IReactorTime, ITCPTransport
from zope.interface import implementer

from pipegrid.reactor.deferreds import Timer

# Twisted keeps written data, joins it, and sends it when the reactor has found the socket writable: a turn
# of the reactor and two copies for each write. A sender of large pieces may send them directly
# (``send_now``), if no earlier data is waiting. This uses undocumented attributes of Twisted (unchanged
# since 2011); where they are missing, Twisted's usual methods are used.


Buffer = bytes | bytearray | memoryview

SEND_BYTES = 512 * 1024
"""
How much is given to the socket at a time, if as much waits; and how much before other connections are
served.
"""

HELD_BACK_BYTES = 4096
"""How much is left to the transport then, so that it continues with this connection."""


SOCKET_NAMES = (
    "_tempDataBuffer",
    "connected",
    "dataBuffer",
    "producer",
    "producerPaused",
    "streamingProducer",
    "writeSomeData",
)
"""The attributes of Twisted's sockets that ``send_now`` and ``Outlet`` use."""

SMALL_BYTES = 1024
"""Shorter pieces that are kept are appended to a copy of the piece before."""


def set_bulk_buffers(transport: Any, receive_bytes: int) -> None:
    """
    Make the socket of a transport, TLS or not, transfer much data at a time.

    Args:
        receive_bytes: how much to read at a time; Twisted reads 64 KiB.
    """
    inner = getattr(transport, "transport", None) or transport
    if hasattr(inner, "bufferSize"):
        inner.bufferSize = receive_bytes
    if hasattr(inner, "SEND_LIMIT"):
        inner.SEND_LIMIT = SEND_BYTES


def socket_of(transport: Any) -> Any:
    """Return the transport if ``send_now`` can use it: one of Twisted's, with its own socket; else None."""
    # Intermediate layers have such names, too, by delegation.
    is_socket = hasattr(type(transport), "writeSomeData")
    return (
        transport if is_socket and all(hasattr(transport, each) for each in SOCKET_NAMES) else None
    )


def is_free(socket: Any) -> bool:
    """Return whether data sent now follows everything that was written before."""
    return socket.connected and not socket.dataBuffer and not socket._tempDataBuffer


def unsent_bytes(transport: Any) -> int:
    """
    Return how many written bytes the kernel has not accepted; 0 for a transport that does not report it.
    """
    unsent = getattr(transport, "_tempDataLen", 0) + len(getattr(transport, "dataBuffer", b""))
    return int(unsent - getattr(transport, "offset", 0))


def send_now(socket: Any, data: Buffer) -> int:
    """
    Send as much as the socket accepts at once, if no other data waits; the caller writes the rest.

    Args:
        socket: from ``socket_of``.

    Returns:
        How many bytes were sent. 0 for a lost connection: the reactor will notice the loss.
    """
    if not is_free(socket):
        return 0
    sent = socket.writeSomeData(data)
    return sent if isinstance(sent, int) and sent > 0 else 0


def send_written(transport: Any) -> None:
    """
    Send what was written to a transport, as far as its socket accepts it, in this turn of the reactor.

    Nothing is done for a transport without a socket of its own, or one that is paused or closing.
    """
    socket = socket_of(transport)
    if socket is None or socket.producerPaused or getattr(socket, "disconnecting", True):
        return
    if socket.connected and unsent_bytes(socket):
        socket.doWrite()  # after an error the reactor tries again, and notices the loss


class Outlet:
    """
    Sends encrypted data: at once, as far as the socket accepts it.

    Args:
        socket: from ``socket_of``, may be None.
    """

    __slots__ = ("_sent_bytes", "_socket")

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._sent_bytes = 0  # since the socket last had to wait

    def send(self, encrypted: memoryview, transport: Any) -> None:
        """
        Send bytes, or let the transport keep and send them; the buffer may be reused afterwards.

        Args:
            transport: of the socket, if there is one.
        """
        socket = self._socket
        if socket:
            self._sent_bytes += len(encrypted)
            turn_ends = self._sent_bytes >= SEND_BYTES
            sent = send_now(socket, encrypted[:-HELD_BACK_BYTES] if turn_ends else encrypted)
            if sent == len(encrypted):
                return
            encrypted = encrypted[sent:]
            self._sent_bytes = 0
        transport.write(bytes(encrypted))
        if socket and socket.producer and socket.streamingProducer and not socket.producerPaused:
            # Any waiting data counts as full: otherwise a large buffer would fill, and be joined, after
            # each write.
            socket.producerPaused = True
            socket.producer.pauseProducing()


def gather(pieces: list[bytes | bytearray], data: bytes) -> None:
    """Append data to pieces; short ones are joined, since each object would take sixty bytes more."""
    if not pieces or len(data) >= SMALL_BYTES:
        pieces.append(data)
    elif isinstance(last := pieces[-1], bytearray):
        last += data
    else:
        pieces.append(bytearray(data))


# Back-pressure for writers that are not producers.


class Writer(Protocol):
    """A writer to the transport."""

    def output_full(self) -> None:
        """Write nothing more until ``output_free``."""

    def output_free(self) -> None:
        """Continue writing: the transport is not full any more."""


@implementer(IPushProducer)
class Backpressure:
    """The producer that passes the transport's state to a writer."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def pauseProducing(self) -> None:
        self._writer.output_full()

    def resumeProducing(self) -> None:
        self._writer.output_free()

    def stopProducing(self) -> None:
        """Do nothing: the connection is lost, which the writer learns otherwise."""


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
