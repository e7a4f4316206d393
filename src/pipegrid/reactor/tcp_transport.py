"""
Additions to Twisted's TCP transports: large reads, immediate sends and back-pressure for bulk data, and
detection of a peer that is gone or accepts no more data.
"""

from __future__ import annotations

import socket as sockets
import sys
from contextlib import suppress
from typing import Any, Protocol

from twisted.internet.interfaces import IPushProducer, IReactorTime, ITCPTransport
from zope.interface import implementer

from pipegrid.reactor.deferreds import Timer

# Twisted keeps written data, joins it, and sends it when the reactor has found the socket writable: each
# write costs a turn of the reactor and two copies. A sender of large pieces may send them directly
# (``send_now``), if no earlier data is waiting. This module uses undocumented attributes of Twisted
# (unchanged since 2011); if one is missing, Twisted's usual methods are used.


Buffer = bytes | bytearray | memoryview

SEND_BYTES = 512 * 1024
"""Maximum bytes per call of the socket, and roughly what a connection sends before others are served."""

HELD_BACK_BYTES = 4096
"""Bytes left to the transport after ``SEND_BYTES``: it sends them later, after other connections."""


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
"""Pieces shorter than this are appended to a copy of the preceding piece."""


def set_bulk_buffers(transport: Any, receive_bytes: int) -> None:
    """
    Make the socket of a transport, with or without TLS, transfer much data at a time.

    Args:
        receive_bytes: the most bytes of one read; Twisted's default is 64 KiB.
    """
    inner = getattr(transport, "transport", None) or transport
    if hasattr(inner, "bufferSize"):
        inner.bufferSize = receive_bytes
    if hasattr(inner, "SEND_LIMIT"):
        inner.SEND_LIMIT = SEND_BYTES


def socket_of(transport: Any) -> Any:
    """
    Return the transport if ``send_now`` can use it, that is, if it is Twisted's own and has a socket; else
    None.
    """
    # Check the type: layers above the socket delegate these names, so they have them, too.
    is_socket = hasattr(type(transport), "writeSomeData")
    return (
        transport if is_socket and all(hasattr(transport, each) for each in SOCKET_NAMES) else None
    )


def is_free(socket: Any) -> bool:
    """Return whether no earlier data waits, so that data sent now keeps its order."""
    return socket.connected and not socket.dataBuffer and not socket._tempDataBuffer


def unsent_bytes(transport: Any) -> int:
    """
    Return how many written bytes the kernel has not accepted yet; 0 if the transport does not report that.
    """
    unsent = getattr(transport, "_tempDataLen", 0) + len(getattr(transport, "dataBuffer", b""))
    return int(unsent - getattr(transport, "offset", 0))


def send_now(socket: Any, data: Buffer) -> int:
    """
    Send at once as much as the socket accepts, if no earlier data waits; the caller writes the rest.

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
    Send data that was written to a transport in this turn of the reactor, as far as the socket accepts it.

    Does nothing for a transport without a socket, and for a paused or closing transport.
    """
    socket = socket_of(transport)
    if socket is None or socket.producerPaused or getattr(socket, "disconnecting", True):
        return
    if socket.connected and unsent_bytes(socket):
        socket.doWrite()  # after an error the reactor tries again and notices the loss


class Outlet:
    """
    Sends encrypted data at once, as far as the socket accepts it.

    Args:
        socket: from ``socket_of``; may be None.
    """

    __slots__ = ("_sent_bytes", "_socket")

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._sent_bytes = 0  # bytes sent since the socket last accepted less than all

    def send(self, encrypted: memoryview, transport: Any) -> None:
        """
        Send bytes, or let the transport keep and send them; afterwards the buffer may be reused.

        Args:
            transport: sends the bytes that the socket does not accept.
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
            # Any waiting data pauses the producer: otherwise a large buffer would fill, and its data would be
            # joined after each write.
            socket.producerPaused = True
            socket.producer.pauseProducing()


def gather(pieces: list[bytes | bytearray], data: bytes) -> None:
    """
    Append data to pieces; short data is joined to the preceding piece, since a separate object takes sixty
    bytes more.
    """
    if not pieces or len(data) >= SMALL_BYTES:
        pieces.append(data)
    elif isinstance(last := pieces[-1], bytearray):
        last += data
    else:
        pieces.append(bytearray(data))


# Back-pressure for writers that are not producers.


class Writer(Protocol):
    """A writer that the transport can stop and resume."""

    def output_full(self) -> None:
        """Stop writing until ``output_free`` is called."""

    def output_free(self) -> None:
        """Continue writing: the transport accepts data again."""


@implementer(IPushProducer)
class Backpressure:
    """A producer that passes the transport's requests to stop and to continue to a writer."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def pauseProducing(self) -> None:
        self._writer.output_full()

    def resumeProducing(self) -> None:
        self._writer.output_free()

    def stopProducing(self) -> None:
        """Do nothing: the connection is lost, and the protocol is notified separately."""


_UNACKNOWLEDGED, _UNSENT, _INFO_BYTES = 24, 144, 148
"""Offsets in Linux's ``struct tcp_info`` of packets in flight and of unsent bytes, and the length needed."""


GONE_S = 30
"""
How long the peer's kernel may acknowledge nothing before a client's connection counts as lost. If this
machine woke up in another network, or a router forgot the connection, nothing ever arrives. The kernel itself
would retry for a quarter of an hour. Healthy servers may be silent for a minute; half a minute leaves time to
connect again.
"""


LOOK_S = 10
STALLED_S = 600
"""
How long the peer may acknowledge all data but accept no more, like a server whose disk hangs, before the
kernel ends the connection. Such a peer is known to exist, and other time limits decide how long to wait for
it.
"""


def be_prompt(transport: Any, clock: IReactorTime) -> StallWatch:
    """
    Make a client's connection send small data at once, and detect within ``GONE_S`` that the peer is gone.

    Args:
        transport: TCP, or TLS over it; any other transport is not changed.

    Returns:
        the watch; stop it when the connection is lost.
    """
    if ITCPTransport.providedBy(transport):
        # Small requests must not wait for the acknowledgement of earlier ones.
        transport.setTcpNoDelay(True)
    inner = getattr(transport, "transport", None) or transport
    watch = StallWatch(clock)
    # Some systems and some transports lack a part of these options.
    with suppress(AttributeError, OSError):
        handle = inner.socket  # not ``getHandle``: after startTLS it returns OpenSSL's object
        handle.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, GONE_S // 3)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, GONE_S // 6)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 4)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, GONE_S * 1000)
        watch.start(handle)
    return watch


class StallWatch:
    """
    Extends the kernel's time limit while the peer acknowledges all data but accepts no more.

    Since Linux 5.11 the kernel's own time limit (TCP_USER_TIMEOUT, ``GONE_S``) would end such a connection.
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
        """Stop checking, as the connection is lost."""
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
    Return whether a TCP socket has unsent data, and no data in flight, because the peer accepts no more.

    Raises:
        AttributeError, OSError: the system does not report that.
    """
    info = socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return False  # an old kernel returns fewer bytes
    unacknowledged, unsent = (
        int.from_bytes(info[at : at + 4], sys.byteorder) for at in (_UNACKNOWLEDGED, _UNSENT)
    )
    return unsent > 0 and not unacknowledged
