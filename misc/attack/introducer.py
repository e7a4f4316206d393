"""
Attack an introducer as a member of its grid who has turned hostile, and say what was listed and what it took.

    python -m misc.attack.introducer [--announcements N] [--connections N]

Starts a ``pipegrid introducer`` process. Ten honest servers announce themselves at one address; then an enemy
at another sends N announcements (100 000) under keys of their own, forged and replayed and oversized ones
among them, first over connections that stay open, then over ever new ones. Prints a JSON line. Exits with 1
if an honest server was not listed any more, a new one at a third address could not be listed, or the process
or its directory became larger than ``MOST_MEMORY_BYTES`` and ``MOST_DISK_BYTES``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from foolscap.api import Referenceable
from foolscap.ipb import IConnectionHintHandler
from tests.interop.processes import Process, until
from twisted.internet import defer, endpoints
from twisted.internet.defer import Deferred
from zope.interface import implementer

from misc.ending import run
from misc.speedtest.peers.nodes import free_port
from pipegrid.errors import RemoteCallError
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.wire.announcements import AnnouncementKey, Signed, sign
from pipegrid.wire.foolscap_broker import make_tub
from pipegrid.wire.introducer_protocol import (
    BOUNDS,
    LOST_AFTER_S,
    RIIntroducerSubscriberClient,
    call,
    connect_introducer,
)
from pipegrid.wire.server_address import parse_furl

HONEST, ENEMY, NEWCOMER = "127.0.0.2", "127.0.0.3", "127.0.0.4"
MOST_MEMORY_BYTES = 128 << 20
"""
More than the idle process has: half of what a storage server may take in an attack. Most is garbage, for
which Python looks seldom.
"""
MOST_DISK_BYTES = 16 << 20
AT_ONCE = 32
NEW_CONNECTION_SENDS = 20
LARGE_BYTES = 30_000
TIMEOUT_S = 60.0


@implementer(IConnectionHintHandler)
class _From:
    """Connects from an address of this machine."""

    def __init__(self, host: str) -> None:
        self._host = host

    def hint_to_endpoint(self, hint: str, reactor: Any, update_status: Any) -> Any:
        """Return where a hint leads, as Foolscap asks for it."""
        _, host, port = hint.split(":")
        endpoint = endpoints.TCP4ClientEndpoint(
            reactor, host, int(port), bindAddress=(self._host, 0)
        )
        return endpoint, host


@implementer(RIIntroducerSubscriberClient)  # type: ignore[misc]
class _Listener(Referenceable):  # type: ignore[misc]
    def __init__(self) -> None:
        self.heard: set[Signed] = set()
        self.first: Deferred[None] = Deferred()

    def remote_announce_v2(self, announcements: set[Signed]) -> None:
        """Note them."""
        self.heard |= announcements
        if not self.first.called:
            self.first.callback(None)


def announcement(number: int, seqnum: int = 1, size: int = 1000) -> Signed:
    """Return the announcement of a server."""
    fields = {
        "service-name": "storage",
        "nickname": f"n{number}",
        "seqnum": seqnum,
        "pad": "x" * size,
    }
    return sign(fields, AnnouncementKey(number.to_bytes(32, "big")))


def sent(number: int, replayed: Signed) -> Signed:
    """Return the enemy's announcement with a number: mostly valid, also forged, replayed and oversized."""
    kind = number % 10
    if kind == 0:
        message, signature, key = announcement(number)
        return message.replace(b"n1", b"n2"), signature, key
    if kind == 1:
        return replayed
    if kind == 2:
        return announcement(number, size=40_000)
    return announcement(number, size=LARGE_BYTES if kind == 3 else 1000)


class IntroducerAttack:
    """
    One run.

    Attributes:
        answers: how many announcements had which answer.
    """

    def __init__(self, reactor: Any, furl: str, announcements: int, connections: int) -> None:
        self.answers: Counter[str] = Counter()
        self._reactor = reactor
        self._furl = parse_furl(furl)
        self._announcements = announcements
        self._connections = connections
        self._replayed = announcement(0, 1)

    async def run(self) -> dict[str, Any]:
        """Attack; returns what a client then sees."""
        honest = [await self._connect(HONEST) for _ in range(10)]
        known = [announcement(number, 2) for number in range(10)]
        for (reference, _), each in zip(honest, known, strict=True):
            await call(reference, "publish_v2", each, Referenceable())
        numbers = iter(range(1000, 1000 + self._announcements))
        crowd = [await self._connect(ENEMY) for _ in range(self._connections)]
        half = self._announcements // 2 // self._connections
        await defer.gatherResults(
            [
                Deferred.fromCoroutine(self._send(reference, [next(numbers) for _ in range(half)]))
                for reference, _ in crowd
            ]
        )
        left = list(numbers)
        while left:  # a connection that is refused too much is left for a new one
            now, left = left[:NEW_CONNECTION_SENDS], left[NEW_CONNECTION_SENDS:]
            if len(left) % 1000 < NEW_CONNECTION_SENDS and len(left) > 10_000:
                now, left = [*now, *left[:1000]], left[1000:]
            reference, tub = await self._connect(ENEMY)
            await self._send(reference, now)
            await tub.stopService()
        newcomer, _ = await self._connect(NEWCOMER)
        new = announcement(100, 1)
        await call(newcomer, "publish_v2", new, Referenceable())
        client, _ = await self._connect(NEWCOMER)
        listener = _Listener()
        await call(client, "subscribe_v2", listener, b"storage", {b"version": 0})
        await listener.first.addTimeout(TIMEOUT_S, self._reactor)
        return {
            "known_listed": len(listener.heard & set(known)),
            "new_listed": new in listener.heard,
            "old_listed": self._replayed in listener.heard,
            "listed": len(listener.heard),
            "answers": dict(self.answers),
        }

    async def _send(self, reference: Any, numbers: list[int]) -> None:
        for begin in range(0, len(numbers), AT_ONCE):
            calls = [
                call(
                    reference, "publish_v2", sent(number, self._replayed), Referenceable()
                ).addCallbacks(self._accepted, self._refused)
                for number in numbers[begin : begin + AT_ONCE]
            ]
            await defer.gatherResults(calls)

    def _accepted(self, _: Any) -> None:
        self.answers["accepted or ignored"] += 1

    def _refused(self, failure: Any) -> None:
        kind = "refused" if failure.check(RemoteCallError) else "connection lost"
        self.answers[kind] += 1

    async def _connect(self, host: str) -> tuple[Any, Any]:
        tub = make_tub(LOST_AFTER_S, DIRECT_CONNECTIONS, BOUNDS)
        tub.removeAllConnectionHintHandlers()
        tub.addConnectionHintHandler("tcp", _From(host))
        tub.startService()
        return await connect_introducer(tub.getReference, self._furl, self._reactor), tub


def memory_of(process: Process, name: str) -> int:
    """Return a process's memory in bytes, now (``VmRSS``) or at most (``VmHWM``)."""
    text = Path(f"/proc/{process._process.pid}/status").read_text("ascii")
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


async def attack(reactor: Any, root: Path, announcements: int, connections: int) -> dict[str, Any]:
    """Start an introducer, attack it, stop it; returns what was measured."""
    port = f"tcp:{free_port()}:interface=127.0.0.1"
    directory = root / "introducer"
    command = (
        *(sys.executable, "-m", "pipegrid.cli", "-d", str(directory)),
        *("introducer", "--port", port),
    )
    process = Process(directory, *command)
    try:
        furl = until(
            lambda: next((x for x in process.log().split() if x.startswith("pb://")), None),
            "the fURL",
            process,
        )
        idle_bytes = memory_of(process, "VmRSS")
        began_s = time.monotonic()
        found = await IntroducerAttack(reactor, furl, announcements, connections).run()
        found["seconds"] = round(time.monotonic() - began_s, 1)
        found["more_memory_bytes"] = memory_of(process, "VmHWM") - idle_bytes
    finally:
        process.stop()
    found["disk_bytes"] = sum(path.stat().st_size for path in directory.rglob("*"))
    found["log_bytes"] = len(process.log())
    return found


def broken(found: dict[str, Any]) -> list[str]:
    """Return which promises a run has broken."""
    checks = {
        "a known server is not listed": found["known_listed"] == 10,
        "a new server is not listed": found["new_listed"],
        "a replayed announcement is listed": not found["old_listed"],
        "the process became too large": found["more_memory_bytes"] <= MOST_MEMORY_BYTES,
        "the directory became too large": found["disk_bytes"] <= MOST_DISK_BYTES,
    }
    return [text for text, holds in checks.items() if not holds]


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> None:
    """Do what the command line says, and exit."""
    parser = argparse.ArgumentParser(prog="python -m misc.attack.introducer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--announcements", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=50)
    options = parser.parse_args(arguments)

    async def work(reactor: Any) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            found = await attack(reactor, Path(scratch), options.announcements, options.connections)
        wrong = broken(found)
        print(json.dumps({**found, "broken": wrong}), file=out)
        if wrong:
            raise SystemExit(1)

    run(work)


if __name__ == "__main__":
    main()
