"""Connections that a command makes before it has imported what will use them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from misc.command import environment
from misc.soak.relayed import RelayedServers
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.protocols.portforward import ProxyFactory
from twisted.trial.unittest import TestCase

from pipegrid.core.encoding_parameters import Params

reactor: Any = installed_reactor
SERVERS = 4


class Counting(ProxyFactory):
    """Passes everything on, and tells of connections."""

    noisy = False

    def __init__(self, port: int, connected: Callable[[], None]) -> None:
        super().__init__("127.0.0.1", port)
        self.connected = connected

    def buildProtocol(self, addr: Any) -> Any:
        self.connected()
        return super().buildProtocol(addr)


class Run(ProcessProtocol):
    """One command; ``ended`` fires with what it printed, and its status."""

    def __init__(self) -> None:
        self.out = self.err = b""
        self.ended: Deferred[tuple[bytes, bytes, int]] = Deferred()

    def outReceived(self, data: bytes) -> None:
        self.out += data

    def errReceived(self, data: bytes) -> None:
        self.err += data

    def processEnded(self, reason: Any) -> None:
        self.ended.callback((self.out, self.err, reason.value.exitCode))


class AheadTests(TestCase):
    """The process of a command, and its servers."""

    timeout = 60

    async def start(self) -> None:
        """Start servers whose connections are counted."""
        self.scratch = Path(self.mktemp()).absolute()
        self.scratch.mkdir()
        self.connections: list[int] = []
        self.told: Deferred[None] = Deferred()
        self.servers = RelayedServers(
            reactor, self.scratch, SERVERS, Params(2, SERVERS), SERVERS, self._relay_to
        )
        await self.servers.start()
        self.addCleanup(self.servers.stop)

    def _relay_to(self, port: int) -> Counting:
        def connected() -> None:
            self.connections.append(port)
            if len(self.connections) == SERVERS and not self.told.called:
                self.told.callback(None)

        return Counting(port, connected)

    def spawn(self, *arguments: str) -> tuple[Run, Any]:
        """Start a command; its standard input stays open."""
        run = Run()
        line = [sys.executable, "-m", "pipegrid.cli", "-d", str(self.servers.client), *arguments]
        process = reactor.spawnProcess(run, sys.executable, line, environment())
        return run, process

    async def printed(self, run: Run) -> bytes:
        """Wait for its end; returns what it printed."""
        out, err, status = await run.ended
        self.assertEqual((status, err), (0, b""))
        return out

    def assertOnce(self) -> None:
        """Each server was connected to once at most since the last time."""
        self.assertEqual(sorted(self.connections), sorted(set(self.connections)))
        self.connections.clear()

    async def _test_before_there_is_anything_to_send(self) -> None:
        await self.start()
        content = os.urandom(3000)
        run, process = self.spawn("-q", "put", "-")
        await self.told
        process.write(content)
        process.closeStdin()
        cap = await self.printed(run)
        self.assertEqual(len(self.connections), SERVERS)
        self.assertOnce()
        run, _ = self.spawn("get", cap.decode("ascii").strip())
        self.assertEqual(await self.printed(run), content)
        self.assertOnce()

    def test_before_there_is_anything_to_send(self) -> Deferred[None]:
        """Servers are connected to first of all, and what was made ahead is what is used."""
        return Deferred.fromCoroutine(self._test_before_there_is_anything_to_send())

    async def _test_with_a_limit(self) -> None:
        await self.start()
        run, process = self.spawn("-q", "put", "--limit-rate", "100M", "-")
        process.write(os.urandom(3000))
        process.closeStdin()
        await self.printed(run)
        self.assertEqual(len(self.connections), SERVERS)
        self.assertOnce()

    def test_with_a_limit(self) -> Deferred[None]:
        """Where every byte is to be counted, nothing is made ahead."""
        return Deferred.fromCoroutine(self._test_with_a_limit())
