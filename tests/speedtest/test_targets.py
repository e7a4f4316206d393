"""What is measured is started and stopped in good order."""

from __future__ import annotations

import socket
from pathlib import Path
from threading import Event

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import GridError, ServerUnreachable, UsageError
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.speedtest import targets
from pipegrid.speedtest.child_processes import make_client
from pipegrid.speedtest.targets import ConfiguredGrid, PrivateGrid, connect_s
from pipegrid.wire import server_address


class SlowServers:
    """Servers that start when the test lets them."""

    made: SlowServers

    def __init__(self, *_: object, **__: object) -> None:
        SlowServers.made = self
        self.entered, self.may_start, self.exited = Event(), Event(), False

    def __enter__(self) -> SlowServers:
        self.entered.set()
        self.may_start.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.exited = True


class BrokenServers(SlowServers):
    """Servers that cannot start."""

    def __enter__(self) -> SlowServers:
        raise RuntimeError("'serve' ended with status 1 before it began")


class PrivateGridTests(TestCase):
    """``PrivateGrid``."""

    timeout = 60

    def test_what_starts_while_we_are_interrupted_is_stopped(self) -> Deferred[None]:
        """Servers that a thread is starting have no chance to be forgotten."""
        return Deferred.fromCoroutine(self._test_interrupted())

    async def _test_interrupted(self) -> None:
        self.patch(targets, "Servers", SlowServers)
        grid = PrivateGrid(reactor, 2)
        starting = Deferred.fromCoroutine(grid.start())
        while not SlowServers.made.entered.is_set():
            await deferLater(reactor, 0.01)
        starting.cancel()
        with self.assertRaises(CancelledError):
            await starting
        stopping = Deferred.fromCoroutine(grid.stop())
        self.assertFalse(SlowServers.made.exited)
        SlowServers.made.may_start.set()
        await stopping
        self.assertTrue(SlowServers.made.exited)

    def test_a_server_that_does_not_start(self) -> Deferred[None]:
        """It is a sentence."""
        return Deferred.fromCoroutine(self._test_broken())

    async def _test_broken(self) -> None:
        self.patch(targets, "Servers", BrokenServers)
        grid = PrivateGrid(reactor, 2)
        with self.assertRaises(GridError) as caught:
            await grid.start()
        self.assertIn("did not start: 'serve' ended with status 1", str(caught.exception))
        await grid.stop()


class ConfiguredGridTests(TestCase):
    """``ConfiguredGrid``."""

    timeout = 60

    def test_what_cannot_be_measured(self) -> Deferred[None]:
        """A directory that configures nothing; servers that nobody reaches."""
        return Deferred.fromCoroutine(self._test_nothing())

    async def _test_nothing(self) -> None:
        with self.assertRaises(UsageError) as caught:
            await ConfiguredGrid(reactor, Path(self.mktemp())).start()
        self.assertIn("configures no grid", str(caught.exception))
        ports: set[int] = set()
        while len(ports) < 2:
            ports.add(self.closed_port())
        addresses = [
            server_address.parse_nurl(f"pb://{'A' * 43}@127.0.0.1:{port}/secret#v=1")
            for port in ports
        ]
        directory = Path(self.mktemp())
        make_client(directory, addresses, Params(1, 2), 1)
        with self.assertRaises(ServerUnreachable) as unreachable:
            await ConfiguredGrid(reactor, directory).start()
        self.assertIn("0 of 2 servers", str(unreachable.exception))
        self.assertIn("see 'pipegrid status'", str(unreachable.exception))

    def test_connecting_nowhere(self) -> Deferred[None]:
        """The sentence says where."""
        return Deferred.fromCoroutine(self._test_nowhere())

    async def _test_nowhere(self) -> None:
        port = self.closed_port()
        with self.assertRaises(ServerUnreachable) as caught:
            await connect_s(reactor, DIRECT_CONNECTIONS, "127.0.0.1", port)
        self.assertIn(f"cannot connect to 127.0.0.1:{port}", str(caught.exception))

    def closed_port(self) -> int:
        """Return a port on which nobody listens."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            return int(listening.getsockname()[1])
