"""
Connections that are made while Python still imports what will use them.

A command that stores a small file computes for longer than its servers are away, and nearly all of that is
importing. TCP and TLS take two round trips, and need neither Twisted nor a grid: a thread makes them
meanwhile, with no more than sockets and ``ssl``. Who wants a connection later takes one that is there; where
there is none, it dials as if this did not exist, so that errors are told by one routine.

Nothing is trusted here: a handshake stops before its last bytes leave, and whoever takes the connection looks
at the certificate before it sends them. What nobody takes is closed after ``KEPT_S``.

==========  ==========================================================================================
connecting  TCP, then TLS, are under way; ``take`` waits for them
ready       the handshake is over but for our last bytes; ``take`` gives it away
gone        it failed, was given away, or is too old; ``take`` says so
==========  ==========================================================================================
"""

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
"""IPv4 or IPv6, as text, and port. There are no names: looking them up can take longer than all the rest."""

MOST = 16
"""Connections that one client makes ahead."""

KEPT_S = 5.0
"""Made earlier, a connection is not to be relied upon: servers close those that ask nothing."""

_RECEIVE_BYTES = 1 << 14


class Handshake(NamedTuple):
    """TLS over memory: what was received goes into one buffer, what is to be sent comes out of the other."""

    tls: ssl.SSLObject
    received: ssl.MemoryBIO
    encrypted: ssl.MemoryBIO


class Preconnected(NamedTuple):
    """A connection; its handshake is over, but for the last bytes that it has to send."""

    socket: socket.socket
    handshake: Handshake


Ready = Callable[[Preconnected | None], None]


def handshake(context: ssl.SSLContext) -> Handshake:
    """Return a client's handshake that has not begun."""
    received, encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
    return Handshake(context.wrap_bio(received, encrypted), received, encrypted)


class _Connecting:
    """One connection on its way."""

    def __init__(self, context: ssl.SSLContext, address: HostPort) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.handshake = handshake(context)
        self.connected = False
        self.over = False  # and it may be given away: changed under the lock only, as is the next
        self.wanted: Ready | None = None

    def go_on(self) -> bool:
        """
        Do what can be done without waiting; returns whether that was the last of it.

        Raises:
            OSError, ValueError: it failed; ``BlockingIOError``: there is nothing to do yet.
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
            # A few hundred bytes on a new connection, which the kernel always has room for.
            to_send = encrypted.read()
            if to_send and self.socket.send(to_send) < len(to_send):
                raise OSError(errno.ENOBUFS, "it took no handshake") from None
            return False
        return True


class Preconnector:
    """
    Makes connections in a thread, from now on.

    Args:
        addresses: each is connected to once, and no more than ``MOST`` of them; what is none is passed over.
        context: for TLS.

    Raises:
        OSError, RuntimeError: there are no files or threads for it.
    """

    def __init__(self, addresses: Iterable[HostPort], context: ssl.SSLContext) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._on_their_way: dict[HostPort, _Connecting] = {}
        with ExitStack() as unless_begun:  # where files or threads run out, none of them stays open
            # Here, where one that cannot be had is told.
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
        Take the connection to an address: nobody else gets it.

        Args:
            ready: is given it, now or later and then in another thread; None: it failed.

        Returns:
            Whether there is one, or may soon be one. ``ready`` is called only then.
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
        """Close what nobody took; who waits is told that it failed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tell.send(b".")
        self._thread.join()

    # What follows runs in the thread, but for the first.

    def _begin(self, context: ssl.SSLContext, address: HostPort) -> None:
        try:
            # What looks like an address and is none would be looked up as a name, which may take long.
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
            pass  # the kernel has nothing to spare, perhaps; who dials is told
        finally:  # whatever happened: nobody else tells who waits
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
        selector.unregister(it.socket)  # from the next line on it may be another's
        with self._lock:
            it.over = over
            wanted = it.wanted
            if failed or wanted is not None:
                del self._on_their_way[address]
        if failed:
            it.socket.close()
        if wanted is not None:
            wanted(None if failed else Preconnected(it.socket, it.handshake))
