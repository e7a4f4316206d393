"""Makes TCP and TLS connections in a thread while Python still imports the modules that will use them."""

from __future__ import annotations

import errno
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple

HostPort = tuple[str, int]
"""An IPv4 or IPv6 address as text, and a port. No names: looking them up can take longer than connecting."""

MOST = 16
"""The most connections that one client preconnects."""

KEPT_S = 5.0
"""How long an unused connection is kept; servers close connections without requests."""

_RECEIVE_BYTES = 1 << 14


class Handshake(NamedTuple):
    """
    TLS in memory: received bytes are put into one buffer, and bytes to send are taken from the other buffer.
    """

    tls: ssl.SSLObject
    received: ssl.MemoryBIO
    encrypted: ssl.MemoryBIO


class Preconnected(NamedTuple):
    """A connection whose handshake is complete, except that its last bytes have not been sent."""

    socket: socket.socket
    handshake: Handshake


Ready = Callable[[Preconnected | None], None]


def handshake(context: ssl.SSLContext) -> Handshake:
    """Return the handshake of a client, before its first step."""
    received, encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
    return Handshake(context.wrap_bio(received, encrypted), received, encrypted)


class _Connecting:
    """A connection that is being made."""

    def __init__(self, context: ssl.SSLContext, address: HostPort) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.handshake = handshake(context)
        self.connected = False
        self.over = False  # ready to be taken; like ``wanted``, changed under the lock
        self.wanted: Ready | None = None

    def go_on(self) -> bool:
        """
        Continue the handshake as far as possible without waiting; return whether the connection is ready.

        Raises:
            OSError, ValueError: the connection failed; ``BlockingIOError``: no data has arrived yet.
        """
        tls, received, encrypted = self.handshake
        if not self.connected:
            problem = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                raise OSError(problem, "it could not be connected")
            self.connected = True
        else:
            data = self.socket.recv(_RECEIVE_BYTES)
            if not data:
                raise OSError(errno.ECONNRESET, "it ended in its handshake")
            received.write(data)
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            # The kernel always accepts the first few hundred bytes of a new connection.
            to_send = encrypted.read()
            if to_send and self.socket.send(to_send) < len(to_send):
                raise OSError(errno.ENOBUFS, "it took no handshake") from None
            return False
        return True


class Preconnector:
    """
    Makes connections in a thread that starts with this object.

    A command that stores a small file spends more time on imports than on round trips to its servers. TCP
    and TLS take two round trips, and need only the modules ``socket`` and ``ssl``. If no usable connection
    exists later, the client connects in the usual way, which also reports errors.

    The handshake stops before its last bytes are sent; the code that takes the connection checks the
    certificate, and only then sends these bytes. Connections that are not taken are closed after
    ``KEPT_S``. States of a connection:

    * connecting: TCP, then TLS, are in progress; ``take`` makes its caller wait for them;
    * ready: the handshake is complete except for the client's last bytes; ``take`` passes the connection to
      its caller;
    * gone: the connection failed, was taken, or is too old; ``take`` returns False.

    Args:
        addresses: one connection is made to each of the first ``MOST``; invalid addresses are skipped.
        context: for TLS.

    Raises:
        OSError, RuntimeError: there are not enough descriptors or threads.
    """

    def __init__(self, addresses: Iterable[HostPort], context: ssl.SSLContext) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._on_their_way: dict[HostPort, _Connecting] = {}
        with ExitStack() as unless_begun:  # close all if descriptors or threads run out
            # The selector is created in the caller's thread, so that the caller gets its errors.
            self._selector = unless_begun.enter_context(selectors.DefaultSelector())
            self._told, self._tell = map(unless_begun.enter_context, socket.socketpair())
            self._told.setblocking(False)
            for address in list(dict.fromkeys(addresses))[:MOST]:
                self._begin(context, address)
            for it in self._on_their_way.values():
                unless_begun.enter_context(it.socket)
            self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
            self._thread.start()
            unless_begun.pop_all()

    def take(self, address: HostPort, ready: Ready) -> bool:
        """
        Take the connection to an address; each connection can be taken once.

        Args:
            ready: called with the connection, now, or later in another thread; with None if the connection
                failed.

        Returns:
            Whether a connection that was not taken before exists or is being made. ``ready`` is called only
                if this is True.
        """
        with self._lock:
            it = self._on_their_way.get(address)
            if it is None or it.wanted is not None:
                return False
            it.wanted = ready
            over = it.over
            if over:
                del self._on_their_way[address]
        if over:
            ready(Preconnected(it.socket, it.handshake))
        return True

    def close(self) -> None:
        """Close all connections that were not taken; waiting callers get None."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tell.send(b".")
        self._thread.join()

    # All following methods run in the thread, except ``_begin``.

    def _begin(self, context: ssl.SSLContext, address: HostPort) -> None:
        try:
            # A malformed address is skipped: it would be looked up as a name, which may take long.
            socket.inet_pton(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, address[0])
            it = _Connecting(context, address)
        except OSError:
            return
        if it.socket.connect_ex(address) in (0, errno.EINPROGRESS):
            self._on_their_way[address] = it
        else:
            it.socket.close()

    def _run(self) -> None:
        try:
            self._make_all()
        except OSError:
            pass  # the kernel may lack memory; the client's own connection attempt reports that
        finally:  # even after errors, since no other code notifies waiting callers
            with self._lock:
                self._closed = True
                left = list(self._on_their_way.values())
                self._on_their_way.clear()
                self._told.close()
                self._tell.close()
            for it in left:
                it.socket.close()
            for it in left:
                if it.wanted is not None:
                    it.wanted(None)

    def _make_all(self) -> None:
        ends_at = time.monotonic() + KEPT_S
        with self._selector as selector:
            selector.register(self._told, selectors.EVENT_READ)
            with self._lock:
                for address, it in self._on_their_way.items():
                    selector.register(it.socket, selectors.EVENT_WRITE, address)
            while self._on_their_way and not self._closed:
                left_s = ends_at - time.monotonic()
                if left_s <= 0:
                    break
                for key, _events in selector.select(left_s):
                    if key.data is not None:
                        self._go_on(selector, key.data)

    def _go_on(self, selector: selectors.BaseSelector, address: HostPort) -> None:
        it = self._on_their_way[address]
        over = failed = False
        try:
            over = it.go_on()
        except BlockingIOError:
            return
        except (OSError, ValueError):
            failed = True
        if not failed and not over:
            selector.modify(it.socket, selectors.EVENT_READ, address)
            return
        selector.unregister(it.socket)  # the next lines may pass the socket to its user
        with self._lock:
            it.over = over
            wanted = it.wanted
            if failed or wanted is not None:
                del self._on_their_way[address]
        if failed:
            it.socket.close()
        if wanted is not None:
            wanted(None if failed else Preconnected(it.socket, it.handshake))
