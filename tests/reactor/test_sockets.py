"""What clients ask of the kernel for a connection; real sockets."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

from twisted.internet import reactor as global_reactor
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase

from pipegrid.http11.connection import PipelinedConnection
from pipegrid.reactor.connecting import AddressEndpoint
from pipegrid.reactor.sockets import GONE_S, be_prompt

LOOPBACK = "127.0.0.1"

reactor: Any = global_reactor


class PromptTests(TestCase):
    """A connection of which the other side is gone."""

    async def test_a_clients_connection(self) -> None:
        """The kernel gives it up, long before patience with the server is over."""
        port = reactor.listenTCP(0, Factory.forProtocol(Protocol), interface=LOOPBACK)
        self.addCleanup(port.stopListening)
        endpoint = AddressEndpoint(reactor, LOOPBACK, port.getHost().port)
        connection = PipelinedConnection(reactor)
        await endpoint.connect(Factory.forProtocol(lambda: connection))
        transport: Any = connection.transport
        handle = transport.getHandle()
        self.assertTrue(handle.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        if sys.platform == "linux":
            option = socket.TCP_USER_TIMEOUT
            self.assertEqual(handle.getsockopt(socket.IPPROTO_TCP, option), 30_000)
            probing_s = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            self.assertLess(probing_s, GONE_S)
        await connection.close()

    def test_other_transports(self) -> None:
        """They are left as they are: those without a socket, and sockets that are not TCP's."""
        be_prompt(object())
        one, other = socket.socketpair()
        with one, other:
            be_prompt(SimpleNamespace(socket=one))
