"""
Our gateway: how many round trips a small file costs, and how it compares with Tahoe-LAFS's own.

    python -m misc.speedtest.gateways [--rtt MS] [--rounds 5] [--only TEXT]... [--tiny]

First ``curl -T`` of 200 B to a gateway on ten ``pipegrid serve`` processes behind a relay, in round trips: of
what one byte takes to an echo behind the same link and back. Then the same requests to both gateways in turns
(A B A B) on the same ten servers of Tahoe-LAFS behind one relay; both are processes that are asked over
loopback. Before each turn a request that does not count has the connections up. The first round does not
count. One JSON line for each figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from misc import ending
from misc.scratch import scratch_directory
from misc.speedtest import processes
from misc.speedtest.peers.__main__ import ATTEMPTS, HAPPY, SERVERS, make_client, start_relay
from misc.speedtest.peers.nodes import HTTPS, TAHOE, Gateway, GatewayFailed, StorageNodes
from misc.speedtest.processes import LOOPBACK, Servers
from pipegrid.core.encoding_parameters import Params

TARGETS = {
    "put 200 B": 3.0,
    "get 200 B": 2.0,
    "put 100 x 200 B at once": 5.0,
    "get 100 x 200 B at once": 10.0,
    "put 100 MB": 3.5,
    "get 100 MB": 12.0,
    "mkdir": 1.3,
    "put 200 B into a directory": 3.5,
    "backup of 50 files in 5 directories": 3.3,
}
TRIPS_TARGET = 1.3
START_S = 120.0
REQUEST_S = 600.0
PINGS = 5
NICE = 10
"""Of our own servers: each has a processor of its own on a grid, as has the gateway."""


class Asked:
    """A gateway of either kind, asked as its users do: each request on a connection of its own."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self._address = urlsplit((directory / "node.url").read_text().strip()).netloc

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Return the answer to a request, which has succeeded. May be called in any thread."""
        with contextlib.closing(HTTPConnection(self._address, timeout=REQUEST_S)) as connection:
            connection.request(method, path, body)
            answer = connection.getresponse()
            data = answer.read()
            if answer.status >= 300:
                raise GatewayFailed(
                    f"{self.name} answered {answer.status} to {method}: {data[:500]!r}"
                )
            return data

    def put(self, data: bytes) -> str:
        """Store a file; returns its cap."""
        return self.ask("PUT", "/uri", data).decode("ascii").strip()

    def make_directory(self) -> str:
        """Make a directory; returns its cap."""
        return self.ask("POST", "/uri?t=mkdir", b"").decode("ascii").strip()


Work = Callable[[Asked, random.Random], Callable[[], object]]
"""Prepares a turn, and returns what is measured."""


def put_files(count: int, size: int) -> Work:
    """So many files at once."""

    def prepare(gateway: Asked, rng: random.Random) -> Callable[[], object]:
        files = [rng.randbytes(size) for _ in range(count)]
        return lambda: _at_once(gateway.put, files)

    return prepare


def get_files(count: int, size: int) -> Work:
    """So many files at once, which the same gateway has stored; they are compared."""

    def prepare(gateway: Asked, rng: random.Random) -> Callable[[], object]:
        files = [rng.randbytes(size) for _ in range(count)]
        caps = _at_once(gateway.put, files)

        def work() -> None:
            found = _at_once(lambda cap: gateway.ask("GET", f"/uri/{cap}"), caps)
            if found != files:
                raise RuntimeError(f"{gateway.name} gave other bytes back")

        return work

    return prepare


def _at_once(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(function, items))


def make_directory(gateway: Asked, _: random.Random) -> Callable[[], object]:
    """One new directory."""
    return gateway.make_directory


def put_into_directory(gateway: Asked, rng: random.Random) -> Callable[[], object]:
    """A new file in a directory that has one already."""
    cap = gateway.make_directory()
    gateway.ask("PUT", f"/uri/{cap}/first", b"first")
    data = rng.randbytes(200)
    return lambda: gateway.ask("PUT", f"/uri/{cap}/second", data)


def backup(gateway: Asked, rng: random.Random) -> Callable[[], object]:
    """The command of Tahoe-LAFS, with a fresh tree and a fresh database."""
    source = Path(tempfile.mkdtemp(dir=gateway.directory))
    for number in range(50):
        path = source / f"directory{number % 5}" / f"file{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rng.randbytes(1000))
    (gateway.directory / "private/backupdb.sqlite").unlink(missing_ok=True)
    cap = gateway.make_directory()
    command = [TAHOE, "-d", str(gateway.directory), "backup", str(source), f"{cap}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def work() -> None:
        subprocess.run(command, check=True, capture_output=True, env=environment)

    return work


SCENARIOS: dict[str, Work] = {
    "put 200 B": put_files(1, 200),
    "get 200 B": get_files(1, 200),
    "put 100 x 200 B at once": put_files(100, 200),
    "get 100 x 200 B at once": get_files(100, 200),
    "put 100 MB": put_files(1, 10**8),
    "get 100 MB": get_files(1, 10**8),
    "mkdir": make_directory,
    "put 200 B into a directory": put_into_directory,
    "backup of 50 files in 5 directories": backup,
}


@contextlib.contextmanager
def our_gateway(directory: Path) -> Iterator[Asked]:
    """Run ``pipegrid gateway`` on a client's directory."""
    url = directory / "node.url"
    url.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pipegrid.cli", "-d", str(directory), "gateway"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", f"tcp:0:interface={LOOPBACK}"], stdout=log, stderr=log
        )
    try:
        end_s = time.monotonic() + START_S
        while not url.exists():
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError((directory / "log").read_text())
            time.sleep(0.05)
        yield Asked("pipegrid", directory)
    finally:
        process.terminate()
        process.wait()


def measure_trips(options: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Return what ``curl -T`` of 200 B costs on our own servers."""
    source = Path(options.scratch or tempfile.gettempdir()) / f"body{rng.randrange(1 << 32)}"
    trips: list[float] = []
    rtts_s: list[float] = []
    servers = Servers(
        SERVERS, rtt_s=options.rtt / 1000, durability="batch", scratch=options.scratch
    )
    with servers, our_gateway(servers.client) as gateway:
        assert servers.echo_port is not None
        url = f"{(servers.client / 'node.url').read_text().strip()}uri"
        _at_once(gateway.put, [rng.randbytes(200) for _ in range(30)])  # all servers are connected
        try:
            for turn in range(options.rounds + 1):
                rtts_s += processes.ping_s(servers.echo_port, PINGS)
                source.write_bytes(rng.randbytes(200))
                form = [
                    "curl",
                    "-sS",
                    "-w",
                    "%{time_total}",
                    "-o",
                    os.devnull,
                    "-T",
                    str(source),
                    url,
                ]
                said = subprocess.run(form, check=True, capture_output=True, text=True).stdout
                if turn:
                    trips.append(float(said) / min(rtts_s))
        finally:
            source.unlink(missing_ok=True)
    return {
        "scenario": "curl -T of 200 B, own servers",
        "unit": "round trips",
        "median": round(statistics.median(trips), 3),
        "spread": [round(min(trips), 3), round(max(trips), 3)],
        "target": TRIPS_TARGET,
        "rtt_ms": round(1000 * min(rtts_s), 1),
    }


def _turn_again(gateway: Asked, name: str, rng: random.Random) -> float:
    """Return what a turn took, in seconds; it is taken again where a gateway gives up under load."""
    for attempt in range(ATTEMPTS):
        try:
            work = SCENARIOS[name](gateway, rng)
            gateway.ask("GET", f"/uri/{gateway.put(rng.randbytes(200))}")
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        except GatewayFailed:  # noqa: PERF203  it is rare
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("a last attempt ends it")


def compare(
    gateways: Sequence[Asked], name: str, options: argparse.Namespace, rng: random.Random
) -> dict[str, Any]:
    """Return what both took, in seconds."""
    found: dict[str, list[float]] = {gateway.name: [] for gateway in gateways}
    for turn in range(options.rounds + 1):
        for gateway in gateways:
            took_s = _turn_again(gateway, name, rng)
            if turn:
                found[gateway.name].append(took_s)
    ours, theirs = (statistics.median(found[gateway.name]) for gateway in gateways)
    return {
        "scenario": name,
        "unit": "times as fast",
        "median": round(theirs / ours, 2),
        "target": TARGETS[name],
        "pipegrid_s": round(ours, 3),
        "tahoe_s": round(theirs, 3),
        "spreads_s": {key: [round(min(v), 3), round(max(v), 3)] for key, v in found.items()},
        "rtt_ms": options.rtt,
    }


def measure(options: argparse.Namespace) -> None:
    """Measure all, and print each figure as soon as it is there."""
    rng = random.Random(options.seed)
    chosen = [name for name in SCENARIOS if any(only in name for only in options.only)]
    if any(only in "curl" for only in options.only):
        print(json.dumps(measure_trips(options, rng)), flush=True)
    if not chosen:
        return
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.scratch)))
        servers = stack.enter_context(StorageNodes(scratch, SERVERS))
        addresses = start_relay(stack, servers.addresses(), options.rtt)
        make_client(scratch / "client", addresses, HTTPS)
        tahoe = Gateway(scratch / "gateway", addresses, HTTPS, Params(), HAPPY)
        stack.enter_context(tahoe)
        ours = stack.enter_context(our_gateway(scratch / "client"))
        gateways = [ours, Asked("tahoe", tahoe.directory)]
        for name in chosen:
            print(json.dumps(compare(gateways, name, options, rng)), flush=True)
            servers.forget()


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rtt", type=float, default=100.0, metavar="MS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="figures with it in the name, or 'curl'"
    )
    parser.add_argument(
        "--scratch", type=scratch_directory, help="where the servers' directories are made"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    options = parser.parse_args(arguments)
    options.only = options.only or [""]
    if options.tiny:
        options.rtt, options.rounds = 5.0, 1
        options.only = ["curl", "put 200 B", "mkdir"]
    ending.end_on_sigterm()
    measure(options)


if __name__ == "__main__":
    main()
