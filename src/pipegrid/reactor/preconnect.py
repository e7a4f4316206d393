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
"""IPv4 or IPv6, as text, and port. No names: looking them up can take longer than all the rest."""

MOST = 16
"""Limit of connections that one client preconnects."""

KEPT_S = 5.0
"""How long a connection is kept: servers close those without requests."""

_RECEIVE_BYTES = 1 << 14


class Handshake(NamedTuple):
    """TLS over memory: received bytes go into one buffer, bytes to send come out of the other."""

    tls: ssl.SSLObject
    received: ssl.MemoryBIO
    encrypted: ssl.MemoryBIO


class Preconnected(NamedTuple):
    """A connection whose handshake is complete except for its last bytes to send."""

    socket: socket.socket
    handshake: Handshake


Ready = Callable[[Preconnected | None], None]


def handshake(context: ssl.SSLContext) -> Handshake:
    """Return a client's handshake that has not begun."""
    received, encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
    return Handshake(context.wrap_bio(received, encrypted), received, encrypted)


class _Connecting:
    """One connection that is being made."""

    def __init__(self, context: ssl.SSLContext, address: HostPort) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.handshake = handshake(context)
        self.connected = False
        self.over = False  # it may be taken: changed only under the lock, as is the next field
        self.wanted: Ready | None = None

    def go_on(self) -> bool:
        """
        Do what can be done without waiting; returns whether the connection is ready.

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
            # The kernel always accepts a few hundred bytes on a new connection.
            to_send = encrypted.read()
            if to_send and self.socket.send(to_send) < len(to_send):
                raise OSError(errno.ENOBUFS, "it took no handshake") from None
            return False
        return True


class Preconnector:
    """
    Makes connections in a thread, from now on.

    A command that stores a small file spends more time on imports than on round trips to its servers. TCP
    and TLS take two round trips, and need only sockets and ``ssl``. If there is no usable connection later,
    the client connects as without this, which also reports errors.

    The handshake stops before its last bytes are sent, and the user of the connection checks the
    certificate before it sends them. Connections that are not taken are closed after ``KEPT_S``. States of
    a connection:

    * connecting: TCP, then TLS, are in progress; ``take`` waits for them;
    * ready: the handshake is complete except for our last bytes; ``take`` returns it;
    * gone: it failed, was taken, or is too old; ``take`` reports that.

    Args:
        addresses: each is connected once, and no more than ``MOST`` of them; invalid ones are skipped.
        context: for TLS.

    Raises:
        OSError, RuntimeError: there are not enough descriptors or threads.
    """

    def __init__(self, addresses: Iterable[HostPort], context: ssl.SSLContext) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._on_their_way: dict[HostPort, _Connecting] = {}
        with ExitStack() as unless_begun:  # close all if descriptors or threads run out
            # Created in this thread, so that errors are raised here.
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
        Take the connection to an address; each can be taken once.

        Args:
            ready: called with it, now or later, then in another thread; None: it failed.

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
        """Close what was not taken; waiting callers get None."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tell.send(b".")
        self._thread.join()

    # Except for the first method, this runs in the thread.

    def _begin(self, context: ssl.SSLContext, address: HostPort) -> None:
        try:
            # A malformed address would be looked up as a name, which may take long.
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
            pass  # perhaps the kernel lacks memory; connecting later reports it
        finally:  # in any case: there is no other code that notifies waiting callers
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
        selector.unregister(it.socket)  # the next line may give it to its user
        with self._lock:
            it.over = over
            wanted = it.wanted
            if failed or wanted is not None:
                del self._on_their_way[address]
        if failed:
            it.socket.close()
        if wanted is not None:
            wanted(None if failed else Preconnected(it.socket, it.handshake))
