"""Twisted's sockets for bulk data: large reads, immediate sends, and back-pressure."""

from __future__ import annotations

from typing import Any, Protocol

from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

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
