"""
Storage servers over Foolscap that answer with what no server should, and real clients that ask them.

    python -m misc.attack.hostile_foolscap [--only NAME]...

For each kind of answer: ``pipegrid status`` and ``pipegrid get`` in processes of their own, with their
status and the most memory that they had. Exits with 1 if one took more than 128 MiB above what it takes with
a server that is not there, needed more than a minute, or connected to where a server told it to. Other
options of attack programs are ignored.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foolscap.api import Referenceable, Tub
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.threads import deferToThread

from misc.command import environment
from misc.speedtest.processes import peak_bytes
from pipegrid.core import base32
from pipegrid.grid.client_paths import CONFIG_NAME, SERVERS_NAME
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.wire.announcements import FURL
from pipegrid.wire.foolscap_broker import make_tub
from pipegrid.wire.foolscap_interfaces import PROTOCOL, RIStorageServer

reactor: Any = installed_reactor

MAX_MORE_BYTES = 128 << 20
PATIENCE_S = 60.0
CAP = f"URI:CHK:{base32.encode(bytes(16))}:{base32.encode(bytes(32))}:1:1:100000"
VERSION = {PROTOCOL: {b"maximum-immutable-share-size": 1 << 40}, b"application-version": b"x"}


class Hostile(Referenceable):  # type: ignore[misc]
    """
    Answers every question in its own way. It says that it is a storage server, without which no client asks
    it anything, and is none, so that nothing at its own end holds it to an interface.
    """

    def __init__(self, version: Callable[[], Any], buckets: Callable[[], Any]) -> None:
        self.remote_get_version = version
        self.remote_get_buckets = lambda index: buckets()

    def getInterfaceName(self) -> str:
        """Claim to be what clients ask for, whatever this is."""
        name: str = RIStorageServer.__remote_name__
        return name


class Reader(Referenceable):  # type: ignore[misc]
    """Gives more than was asked for."""

    def remote_read(self, offset: int, length: int) -> bytes:
        """Give 300 MB."""
        return b"x" * 300_000_000


def deep() -> Any:
    """Return lists in lists."""
    value: Any = []
    for _ in range(900):
        value = [value]
    return value


def usual() -> Any:
    """Return what a server says."""
    return VERSION


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "version-of-300-mb": (lambda: {PROTOCOL: b"x" * 300_000_000}, dict),
    "version-of-a-million-parts": (lambda: {PROTOCOL: list(range(1_000_000))}, dict),
    "version-that-is-deep": (deep, dict),
    "a-hundred-thousand-shares": (usual, lambda: {n: Reader() for n in range(100_000)}),
    "one-share-read-at-length": (usual, lambda: {0: Reader()}),
    "failure-of-100-mb": (lambda: _fail(), lambda: _fail()),
}


def _fail() -> Any:
    raise ValueError("x" * 100_000_000)


class Elsewhere(Factory):
    """Where clients are told to go, and should not."""

    noisy = False

    def __init__(self) -> None:
        self.connections = 0

    def buildProtocol(self, addr: Any) -> Protocol:
        """Count them."""
        self.connections += 1
        return Protocol()


async def attack(only: list[str]) -> bool:
    """Be all kinds of servers; returns whether all bounds held."""
    elsewhere = Elsewhere()
    there = reactor.listenTCP(0, elsewhere, interface="127.0.0.1")
    other = make_tub(60, DIRECT_CONNECTIONS)
    other.setLocation(f"tcp:127.0.0.1:{there.getHost().port}")
    gift = other.registerReference(Referenceable())
    idle = await deferToThread(run_client, gift, "status")
    elsewhere.connections = 0
    held = True
    for name in only or [*KINDS, "gift"]:
        tub = Tub()
        tub.unsafeTracebacks = False
        port = reactor.listenTCP(0, Factory(), interface="127.0.0.1")
        number = port.getHost().port
        await port.stopListening()
        tub.setLocation(f"tcp:127.0.0.1:{number}")
        tub.listenOn(f"tcp:{number}:interface=127.0.0.1")
        tub.startService()
        version, buckets = KINDS.get(
            name, (lambda: {PROTOCOL: Gift(gift)}, lambda: {0: Gift(gift)})
        )
        furl = tub.registerReference(Hostile(version, buckets))
        for command in ("status", "get"):
            status, peak, took_s = await deferToThread(run_client, furl, command)
            more = peak - idle[1]
            assert status != 2, "the client did not even begin"
            good = more <= MAX_MORE_BYTES and took_s <= PATIENCE_S and not elsewhere.connections
            held = held and good
            line = {"server": name, "command": command, "status": status, "more_mib": more >> 20}
            print(json.dumps({**line, "seconds": round(took_s, 1), "held": good}), flush=True)
        await tub.stopService()
    await there.stopListening()
    return held


def run_client(furl: str, command: str) -> tuple[int, int, float]:
    """Return a client's exit status, the most memory that it had, and how long it took."""
    with tempfile.TemporaryDirectory(prefix="pipegrid-hostile-") as scratch:
        directory = Path(scratch)
        (directory / "private").mkdir()
        (directory / CONFIG_NAME).write_text("[client]\n")
        for name in ("convergence", "secret"):
            (directory / "private" / name).write_text(base32.encode(bytes(32)) + "\n")
        entry = {"ann": {"nickname": "hostile", FURL: furl}}
        (directory / SERVERS_NAME).write_text(json.dumps({"storage": {"hostile": entry}}))
        arguments = [command] if command == "status" else [command, CAP]
        program = [sys.executable, "-m", "pipegrid.cli", "-q", "-d", scratch, *arguments]
        began = time.monotonic()
        peak = 0
        with subprocess.Popen(
            program, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as client:
            # Not getrusage: a new process begins with what its parent has had.
            while client.poll() is None:
                with contextlib.suppress(OSError, RuntimeError):
                    peak = max(peak, peak_bytes(client.pid))
                time.sleep(0.01)
        return client.returncode, peak, time.monotonic() - began


class Gift:
    """A reference to something that somebody else has."""

    def __init__(self, furl: str) -> None:
        self.furl = furl


def _register_gifts() -> None:
    from foolscap.slicer import BaseSlicer

    class GiftSlicer(BaseSlicer):  # type: ignore[misc]
        opentype = ("their-reference",)
        slices = Gift

        def sliceBody(self, streamable: bool, banana: Any) -> Any:
            yield 1
            yield self.obj.furl.encode("ascii")


def main() -> int:
    """Run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", action="append", choices=[*KINDS, "gift"], metavar="NAME")
    options, _ = parser.parse_known_args()
    _register_gifts()
    outcome: list[bool] = []

    def ended(result: Any) -> None:
        outcome.append(result is True)
        if result is not True and result is not False:
            print(result, file=sys.stderr)
        reactor.stop()

    running = Deferred.fromCoroutine(attack(options.only or []))
    running.addBoth(ended)
    reactor.run(installSignalHandlers=False)
    return 0 if outcome == [True] else 1


if __name__ == "__main__":
    sys.exit(main())
