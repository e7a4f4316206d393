"""What clients ask of the kernel for a connection; real sockets."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import SkipTest

from twisted.internet import reactor as global_reactor
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from pipegrid.http11.connection import PipelinedConnection
from pipegrid.reactor.tcp_socks5_endpoints import AddressEndpoint
from pipegrid.reactor.tcp_transport import GONE_S, LOOK_S, STALLED_S, be_prompt, is_stalled

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

    def test_the_other_side_reads_nothing(self) -> None:
        """That is no reason for the kernel to give it up, as long as it acknowledges what is sent."""
        if sys.platform != "linux":
            raise SkipTest("only Linux tells")
        clock = Clock()
        with socket.create_server((LOOPBACK, 0)) as port:
            one = socket.create_connection(port.getsockname())
            other, _ = port.accept()
        with one, other:
            one.setblocking(False)
            watch = be_prompt(SimpleNamespace(socket=one), clock)
            other.settimeout(5)

            def time_limit_s() -> float:
                clock.advance(LOOK_S)
                return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000

            self.assertEqual(time_limit_s(), GONE_S)
            sent_bytes = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent_bytes += one.send(bytes(1 << 20))
            _wait_until(lambda: is_stalled(one))
            self.assertEqual(time_limit_s(), STALLED_S)
            while sent_bytes:
                sent_bytes -= len(other.recv(1 << 20))
            _wait_until(lambda: not is_stalled(one))
            self.assertEqual(time_limit_s(), GONE_S)
            watch.stop()
            self.assertFalse(clock.getDelayedCalls())

    def test_other_transports(self) -> None:
        """They are left as they are: those without a socket, and sockets that are not TCP's."""
        be_prompt(object(), Clock()).stop()
        one, other = socket.socketpair()
        with one, other:
            be_prompt(SimpleNamespace(socket=one), Clock()).stop()


def _wait_until(is_so: Callable[[], bool]) -> None:
    """What the kernel does takes a moment."""
    ends_s = time.monotonic() + 10
    while not is_so() and time.monotonic() < ends_s:
        time.sleep(0.01)
