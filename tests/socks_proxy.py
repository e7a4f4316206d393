"""A SOCKS5 proxy for tests: it knows names of its own, and records who asked for what."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from typing import Any

from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase


class OnlyProxies:
    """
    Lets a reactor connect to these ports of this machine only, and look up nothing, until it is undone.

    Attributes:
        violations: what was attempted all the same.
    """

    def __init__(self, test: TestCase, reactor: Any, ports: Collection[int]) -> None:
        self.violations: list[str] = []
        connect = socket.socket.connect
        connect_ex = socket.socket.connect_ex

        def checked(address: Any) -> None:
            if isinstance(address, tuple) and (
                address[0] != "127.0.0.1" or address[1] not in ports
            ):
                self.violations.append(f"connect {address}")
                raise OSError(f"the test permits no connection to {address}")

        class Guarded(socket.socket):
            def connect(self, address: Any) -> None:
                checked(address)
                connect(self, address)

            def connect_ex(self, address: Any) -> int:
                checked(address)
                return connect_ex(self, address)

        def lookup(*arguments: Any, **more: Any) -> Any:
            self.violations.append(f"lookup {arguments[:1]}")
            raise socket.gaierror("the test permits no lookup")

        test.patch(socket, "socket", Guarded)
        for name in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getfqdn"):
            test.patch(socket, name, lookup)
        before = reactor.installNameResolver(self)
        test.addCleanup(reactor.installNameResolver, before)

    def place_of(self, host: bytes, port: int) -> Any:
        """Refuse, in place of the lookups of mirrors that are connected to in advance."""
        self.violations.append(f"lookup {host!r}")
        raise OSError("the test permits no lookup")

    def resolveHostName(self, receiver: Any, hostName: str, *more: Any, **named: Any) -> Any:
        """Refuse: no name may be looked up."""
        self.violations.append(f"lookup {hostName}")
        raise OSError("the test permits no lookup")


class SocksProxy(Factory):
    """
    Listens for connections to hosts.

    Args:
        reactor: connects to the hosts.
        names: the address of each name that the proxy knows.
        wants: the one user name and password that it accepts; None: any, and none.
        port_of: maps ports, as a network address translator does.

    Attributes:
        asked: host and port of each request, as the client sent them.
        logins: the user name and password of each request, if it had some.
    """

    noisy = False

    def __init__(
        self,
        reactor: Any,
        names: dict[str, str] | None = None,
        wants: tuple[bytes, bytes] | None = None,
        port_of: dict[int, int] | None = None,
    ) -> None:
        self.reactor = reactor
        self.names = names or {}
        self.wants = wants
        self.port_of = port_of or {}
        self.asked: list[tuple[str, int]] = []
        self.logins: list[tuple[bytes, bytes] | None] = []

    def buildProtocol(self, addr: Any) -> SocksSession:
        return SocksSession(self)


class SocksSession(Protocol):
    """One client of the proxy."""

    def __init__(self, proxy: SocksProxy) -> None:
        self._proxy = proxy
        self._data = b""
        self._state = "methods"
        self._login: tuple[bytes, bytes] | None = None
        self._far: Any = None

    def dataReceived(self, data: bytes) -> None:
        if self._far is not None:
            self._far.transport.write(data)
            return
        self._data += data
        while self._step():
            pass

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._far is not None:
            self._far.transport.loseConnection()

    def _write(self, data: bytes) -> None:
        transport: Any = self.transport
        transport.write(data)

    def _step(self) -> bool:
        data = self._data
        if self._state == "methods" and len(data) >= 2 and len(data) >= 2 + data[1]:
            methods, self._data = data[2 : 2 + data[1]], data[2 + data[1] :]
            method = 2 if 2 in methods else 0 if self._proxy.wants is None else 255
            self._state = "login" if method == 2 else "request"
            self._write(bytes([5, method]))
            return True
        if self._state == "login" and len(data) >= 2 and len(data) >= 3 + data[1]:
            name = data[2 : 2 + data[1]]
            length = data[2 + data[1]]
            if len(data) < 3 + data[1] + length:
                return False
            password = data[3 + data[1] : 3 + data[1] + length]
            self._data = data[3 + data[1] + length :]
            self._login = (name, password)
            good = self._proxy.wants in (None, self._login)
            self._write(bytes([1, 0 if good else 1]))
            self._state = "request"
            return True
        if self._state == "request" and len(data) >= 5:
            size = {1: 4, 3: 1 + data[4], 4: 16}[data[3]]
            if len(data) < 6 + size:
                return False
            where, self._data = data[4 : 4 + size], data[6 + size :]
            port = int.from_bytes(data[4 + size : 6 + size], "big")
            host = where[1:].decode() if data[3] == 3 else str(ipaddress.ip_address(where))
            self._state = "connecting"
            self._connect(host, port)
        return False

    def _connect(self, host: str, port: int) -> None:
        proxy = self._proxy
        proxy.asked.append((host, port))
        proxy.logins.append(self._login)
        try:
            address = str(ipaddress.ip_address(host))
        except ValueError:
            address = proxy.names.get(host, "")
        if not address:
            self._refuse(4)
            return
        to = TCP4ClientEndpoint(proxy.reactor, address, proxy.port_of.get(port, port))
        far = Factory.forProtocol(lambda: _Far(self))
        far.noisy = False
        to.connect(far).addCallbacks(self._connected, lambda _: self._refuse(5))

    def _refuse(self, code: int) -> None:
        self._write(bytes([5, code, 0, 1, 0, 0, 0, 0, 0, 0]))
        transport: Any = self.transport
        transport.loseConnection()

    def _connected(self, far: Any) -> None:
        self._far = far
        self._write(bytes([5, 0, 0, 1, 0, 0, 0, 0, 0, 0]))
        if self._data:
            far.transport.write(self._data)


class _Far(Protocol):
    def __init__(self, near: SocksSession) -> None:
        self._near = near

    def dataReceived(self, data: bytes) -> None:
        self._near._write(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        transport: Any = self._near.transport
        if transport is not None:
            transport.loseConnection()
