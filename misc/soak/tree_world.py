"""
A directory of files, storage servers behind relays that count both ways, and real commands between them.

Servers and relays are in this process, so that a command can be killed when so many bytes have passed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.protocols.portforward import ProxyClient, ProxyClientFactory, ProxyFactory, ProxyServer

from misc.command import command, environment
from misc.soak.kill_put import Violation
from misc.soak.relayed import RelayedServers
from pipegrid.core.encoding_parameters import Params

TIMEOUT_S = 1500.0
_SETTLE_S = 0.3
_KEPT_BYTES = 16 << 10


class Counter:
    """
    Counts what passes the relays; kills a command when it is time.

    Attributes:
        up: bytes to servers.
        down: bytes to clients.
        seconds: between the first and the last of them.
    """

    def __init__(self) -> None:
        self.up = self.down = 0
        self.seconds = 0.0
        self._first_s: float | None = None
        self._victim: subprocess.Popen[str] | None = None
        self._kill_at = 0

    def begin(self) -> None:
        """Count from 0 on."""
        self.up = self.down = 0
        self.seconds = 0.0
        self._first_s = None
        self._victim = None

    def kill(self, victim: subprocess.Popen[str], at_bytes: int) -> None:
        """Kill a process when so many bytes have passed, both ways together."""
        self._victim, self._kill_at = victim, at_bytes

    def passed(self, up: int, down: int) -> None:
        """So many bytes more have."""
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        self.seconds = now_s - self._first_s
        self.up += up
        self.down += down
        if self._victim is not None and self.up + self.down >= self._kill_at:
            victim, self._victim = self._victim, None
            victim.send_signal(signal.SIGKILL)


def relay_to(port: int, counter: Counter) -> ProxyFactory:
    """Return what relays connections to a port, and counts."""

    class Answers(ProxyClient):
        def dataReceived(self, data: bytes) -> None:
            counter.passed(0, len(data))
            super().dataReceived(data)

    class AnswersFactory(ProxyClientFactory):
        protocol = Answers

    class Questions(ProxyServer):
        clientProtocolFactory = AnswersFactory

        def connectionMade(self) -> None:
            # What was counted is to be on its way to the client, and not in a buffer of megabytes here.
            transport: Any = self.transport
            transport.socket.setsockopt(SOL_SOCKET, SO_SNDBUF, _KEPT_BYTES)
            super().connectionMade()

        def dataReceived(self, data: bytes) -> None:
            counter.passed(len(data), 0)
            super().dataReceived(data)

    factory = ProxyFactory("127.0.0.1", port)
    factory.protocol = Questions
    factory.noisy = False
    return factory


@attrs.frozen
class Ended:
    """What a command gave, the bytes that passed to servers and to it, and the time from first to last."""

    status: int
    out: str
    err: str
    up: int
    down: int
    seconds: float


class TreeWorld(RelayedServers):
    """
    Servers, and clients of them.

    Attributes:
        counter: of all that passes.
    """

    def __init__(self, reactor: Any, scratch: Path, servers: int, params: Params) -> None:
        self.scratch = scratch
        self.counter = Counter()
        super().__init__(
            reactor,
            scratch,
            servers,
            params,
            params.total_shares,
            lambda port: relay_to(port, self.counter),
        )

    async def run(
        self, *arguments: str, kill_at: int | None = None, client: Path | None = None
    ) -> Ended:
        """
        Run a command, and let servers work off what it sent.

        Args:
            kill_at: ``kill -9`` it when so many bytes have passed.
            client: a client's directory, other than ours.
        """
        self.counter.begin()
        process = subprocess.Popen(
            command(client or self.client, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | {"XDG_CACHE_HOME": str(self.scratch / "cache")},
        )
        if kill_at is not None:
            self.counter.kill(process, kill_at)
        ending: Deferred[Any] = deferToThread(process.communicate, None, TIMEOUT_S)
        try:
            out, err = await ending
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise Violation(f"{arguments} hung for {TIMEOUT_S:g} s") from None
        before = -1
        while before != self.counter.up + self.counter.down:
            before = self.counter.up + self.counter.down
            await deferLater(self.reactor, _SETTLE_S)
        counter = self.counter
        return Ended(process.returncode, out, err, counter.up, counter.down, counter.seconds)


def make_tree(root: Path, rng: random.Random, sizes: Sequence[int], a_directory: int = 10) -> None:
    """Make files of these sizes, so many to a directory, with modes and times of their own, and a link."""
    for number, size in enumerate(sizes):
        path = root / f"d{number // a_directory // 5}" / f"e{number // a_directory}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(size))
        path.chmod(rng.choice((0o600, 0o644, 0o755)))
        when_ns = rng.randrange(10**18, 15 * 10**17)
        os.utime(path, ns=(when_ns, when_ns))
    (root / "empty").mkdir()
    os.symlink("d0/e0/f0", root / "link")
    os.utime(root / "d0", ns=(10**18 + 1, 10**18 + 1))


def described(root: Path) -> dict[str, tuple[object, ...]]:
    """Return all that a tree is: of each path its kind, mode, time, and content; below the root."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", status.st_mtime_ns, os.readlink(path))
        elif path.is_dir():
            found[name] = ("directory", status.st_mode, status.st_mtime_ns)
        else:
            found[name] = ("file", status.st_mode, status.st_mtime_ns, path.read_bytes())
    return found
