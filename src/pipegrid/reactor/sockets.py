"""Twisted's sockets: bulk transfer, back-pressure, signal wake-up."""

from __future__ import annotations

import os
import signal
import socket as sockets
import sys
from contextlib import suppress
from typing import Any, Protocol

from twisted.internet.interfaces import IPushProducer, IReactorTime, IReadDescriptor, ITCPTransport
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.reactor.deferreds import Timer

# Twisted's sockets for bulk data: much moved at a time, and sent at once where nothing waits.
#
# Twisted keeps what is written, joins it, and sends it when the reactor has found the socket writable: a turn
# of the reactor and two copies for each write. A sender of large pieces may send them itself
# (``send_now``), as long as nothing that was written before it waits.
#
# This uses attributes that Twisted does not document (their like has been there since 2011). Where they are
# missing all works as without.

_UNACKNOWLEDGED, _UNSENT, _INFO_BYTES = 24, 144, 148
"""Where Linux's ``struct tcp_info`` has packets on their way, and bytes that wait."""

Buffer = bytes | bytearray | memoryview

SEND_BYTES = 512 * 1024
"""Given to the socket at a time, if as much waits; and, if it takes all, before others have their turn."""

HELD_BACK_BYTES = 4096
"""Left to the transport when it is the others' turn, so that it comes back to this connection."""

GONE_S = 30
"""
So long the other side's kernel may acknowledge nothing before a client's connection is taken to be lost.
Where a machine woke up in another network, or a router forgot the connection, nothing ever comes. The kernel
by itself tries for a quarter of an hour, and servers may be silent for a minute, for reasons of their own:
half of that leaves time to connect anew.
"""

LOOK_S = 10
STALLED_S = 600
"""
So long it may acknowledge all, and take no more, as that of a server whose disk stands still: it is known to
be there, and how long it is waited for is for others to say.
"""

SOCKET_NAMES = (
    "_tempDataBuffer",
    "connected",
    "dataBuffer",
    "producer",
    "producerPaused",
    "streamingProducer",
    "writeSomeData",
)
"""What a socket of Twisted's has that ``send_now`` and ``Outlet`` use."""

SMALL_BYTES = 1024
"""Of a piece that is copied behind another one when both are to be kept."""


def set_bulk_buffers(transport: Any, receive_bytes: int) -> None:
    """
    Have the socket beneath a transport, TLS or not, move much at a time.

    Args:
        receive_bytes: asked of it at a time; Twisted's own 64 KiB are little.
    """
    beneath = getattr(transport, "transport", None) or transport
    if hasattr(beneath, "bufferSize"):
        beneath.bufferSize = receive_bytes
    if hasattr(beneath, "SEND_LIMIT"):
        beneath.SEND_LIMIT = SEND_BYTES


def be_prompt(transport: Any, clock: IReactorTime) -> StallWatch:
    """
    Have a client's connection send at once, and find out within ``GONE_S`` that the other side is gone.

    Args:
        transport: TCP, TLS over it, or anything else, which stays as it is.

    Returns:
        what is to be stopped when the connection is lost.
    """
    if ITCPTransport.providedBy(transport):
        # Small requests must not wait for the acknowledgement of earlier ones.
        transport.setTcpNoDelay(True)
    beneath = getattr(transport, "transport", None) or transport
    watch = StallWatch(clock)
    # Other systems, and other transports, have not all of these.
    with suppress(AttributeError, OSError):
        handle = beneath.socket  # ``getHandle`` gives OpenSSL's, where TLS was started on it
        handle.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, GONE_S // 3)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, GONE_S // 6)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 4)
        handle.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, GONE_S * 1000)
        watch.start(handle)
    return watch


class StallWatch:
    """
    Has the kernel be patient with the other side while that acknowledges all, and takes no more.

    Since Linux 5.11 TCP_USER_TIMEOUT ends such a connection, too.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._timer = Timer(clock, self._look)
        self._socket: Any = None
        self._patience_s = GONE_S

    def start(self, socket: Any) -> None:
        """Look at this socket from time to time."""
        self._socket = socket
        self._timer.set(LOOK_S)

    def stop(self) -> None:
        """Look no more, as the connection is lost."""
        self._timer.stop()
        self._socket = None

    def _look(self) -> None:
        with suppress(AttributeError, OSError):
            patience_s = STALLED_S if is_stalled(self._socket) else GONE_S
            if patience_s != self._patience_s:
                option = sockets.TCP_USER_TIMEOUT
                self._socket.setsockopt(sockets.IPPROTO_TCP, option, patience_s * 1000)
                self._patience_s = patience_s
            self._timer.set(LOOK_S)


def is_stalled(socket: Any) -> bool:
    """
    Return whether a TCP socket has something to send, and nothing on its way, as the other side takes
    no more.

    Raises:
        AttributeError, OSError: nobody knows.
    """
    info = socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return False  # of an old kernel
    unacknowledged, unsent = (
        int.from_bytes(info[at : at + 4], sys.byteorder) for at in (_UNACKNOWLEDGED, _UNSENT)
    )
    return unsent > 0 and not unacknowledged


def socket_of(transport: Any) -> Any:
    """Return the transport if ``send_now`` can use it: Twisted's, with a socket of its own; or None."""
    # Layers between have such names, too: they ask what is beneath them.
    is_socket = hasattr(type(transport), "writeSomeData")
    return (
        transport if is_socket and all(hasattr(transport, each) for each in SOCKET_NAMES) else None
    )


def is_free(socket: Any) -> bool:
    """Return whether what is sent on it now would come behind all that was written before."""
    return socket.connected and not socket.dataBuffer and not socket._tempDataBuffer


def unsent_bytes(transport: Any) -> int:
    """Return how much was written that the kernel has not taken yet; 0 of a transport that does not tell."""
    unsent = getattr(transport, "_tempDataLen", 0) + len(getattr(transport, "dataBuffer", b""))
    return int(unsent - getattr(transport, "offset", 0))


def send_now(socket: Any, data: Buffer) -> int:
    """
    Send what the socket takes at once, if nothing waits to be sent; the caller writes the rest.

    Args:
        socket: what ``socket_of`` returned.

    Returns:
        How many bytes it took. A connection that turns out to be lost takes none: the reactor will find out.
    """
    if not is_free(socket):
        return 0
    sent = socket.writeSomeData(data)
    return sent if isinstance(sent, int) and sent > 0 else 0


class Outlet:
    """
    Where what was encrypted leaves a connection: at once, as far as the socket takes it.

    Args:
        socket: what ``socket_of`` returned; None if there is none.
    """

    __slots__ = ("_sent_bytes", "_socket")

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._sent_bytes = 0  # since the socket last had to wait

    def send(self, encrypted: memoryview, transport: Any) -> None:
        """
        Send bytes, or have the transport keep and send them; the buffer is free again afterwards.

        Args:
            transport: stands on the socket, if there is one.
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
            # Full is what has to wait at all: else a large buffer would fill, and be joined, behind each.
            socket.producerPaused = True
            socket.producer.pauseProducing()


def gather(pieces: list[bytes | bytearray], data: bytes) -> None:
    """Add what came to what came before; short pieces together, since each would take sixty bytes more."""
    if not pieces or len(data) >= SMALL_BYTES:
        pieces.append(data)
    elif isinstance(last := pieces[-1], bytearray):
        last += data
    else:
        pieces.append(bytearray(data))


# How full a transport is, told to who is no producer himself.


class Writer(Protocol):
    """Who writes to the transport."""

    def output_full(self) -> None:
        """Write nothing more for now."""

    def output_free(self) -> None:
        """Go on writing: the transport has room again."""


@implementer(IPushProducer)
class Backpressure:
    """Told by the transport how full it is."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def pauseProducing(self) -> None:
        self._writer.output_full()

    def resumeProducing(self) -> None:
        self._writer.output_free()

    def stopProducing(self) -> None:
        """It is gone, and the writer will hear of it."""


# Signals that a reactor does not sleep through, where its own handlers are not wanted.
#
# Python notes a signal when it comes, and runs the handler when the main thread executes its next
# instruction. If the signal comes just before the reactor waits for the network, or to another thread,
# that is not until something else happens: a server that was told to end in the moment when it began to
# listen never did.

_AT_ONCE = 4096


def wake_for_signals(reactor: Any) -> None:
    """Have every signal that is handled wake the reactor, so that the handler runs. The main thread only."""
    told, tell = os.pipe()
    for fd in (told, tell):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    reactor.addReader(_Told(told))


@implementer(IReadDescriptor)
class _Told:
    """The end of a pipe into which the system's side of Python writes the number of each signal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "signals"

    def doRead(self) -> None:
        # The handlers run because the reactor does: what was told does not matter.
        os.read(self._fd, _AT_ONCE)

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the reactor has ended, and the pipe is not its to close."""
