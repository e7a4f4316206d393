"""
A gateway and many clients: large bodies, crowds, clients that stop reading, leave, or send a byte per second.

    python -m misc.soak.gateway_clients [--gb 8] [--clients 200] [--idle 1000] [--hostile 60] [--tiny]

Runs ``pipegrid gateway`` on an embedded grid that stores one share of each file, so that a file takes its own
size on the disk, and its size once more while it is stored. One JSON line for each part: the peak of resident
memory above that of the idle gateway, and the times of a client that stores and fetches 200 B meanwhile. At
the end nothing may be left: no temporary file, no descriptor, no connection. Status 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any

from misc import ending
from misc.command import environment
from misc.scratch import scratch_directory
from misc.speedtest import processes

START_S = 120.0
REQUEST_S = 3600.0
MOST_ABOVE_IDLE = 160 << 20
SETTLED_S = 60.0
BLOCK = 1 << 20
_MIB = 1 << 20


class Stream:
    """
    A body that is made while it is read, and takes no space.

    Attributes:
        checksum: of what was read so far.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.checksum = 0
        self._left = size
        self._number = 0
        self._block = random.Random(seed).randbytes(BLOCK - 8)

    def read(self, _: int = -1) -> bytes:
        """Return the next piece; empty at the end."""
        piece = (self._number.to_bytes(8, "big") + self._block)[: self._left]
        self._number += 1
        self._left -= len(piece)
        self.checksum = zlib.crc32(piece, self.checksum)
        return piece


class Target:
    """One gateway, which runs while this is entered."""

    def __init__(self, scratch: Path) -> None:
        self.directory = scratch / "client"
        self._scratch = scratch
        self._stack = contextlib.ExitStack()
        self.pid = 0
        self.address = ""

    def __enter__(self) -> Target:
        command = [sys.executable, "-m", "pipegrid.cli", "-d", str(self.directory)]
        made = [*command, "init", "--local", "-k", "1", "-n", "1", "--happy", "1"]
        with processes.running(made) as process:
            process.wait(START_S)
        port = f"tcp:0:interface={processes.LOOPBACK}"
        log = self._stack.enter_context((self._scratch / "log").open("wb"))
        gateway = subprocess.Popen(
            [*command, "gateway", "--port", port], stdout=log, stderr=log, env=environment()
        )
        self._stack.callback(gateway.wait)
        self._stack.callback(gateway.terminate)
        self.pid = gateway.pid
        end_s = time.monotonic() + START_S
        while not (self.directory / "node.url").exists():
            if gateway.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError("the gateway does not start")
            time.sleep(0.05)
        url = (self.directory / "node.url").read_text().strip()
        self.address = url.removeprefix("http://").rstrip("/")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def connect(self) -> HTTPConnection:
        """Return a new connection."""
        return HTTPConnection(self.address, timeout=REQUEST_S)

    def raw(self) -> socket.socket:
        """Return a new connection without HTTP."""
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), REQUEST_S)

    def put(self, body: Any, size: int) -> str:
        """Store a file; returns its cap."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("PUT", "/uri", body, {"Content-Length": str(size)})
            answer = connection.getresponse()
            said = answer.read().decode()
            if answer.status != 200:
                raise RuntimeError(f"a PUT was answered {answer.status}: {said}")
            return said

    def get(self, cap: str) -> tuple[int, int]:
        """Fetch a file; returns its size and checksum."""
        size = checksum = 0
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", f"/uri/{cap}")
            answer = connection.getresponse()
            while piece := answer.read(BLOCK):
                size += len(piece)
                checksum = zlib.crc32(piece, checksum)
            return size, checksum

    def resident(self, field: str = "VmRSS") -> int:
        """Return resident memory in bytes; ``VmHWM`` is its peak."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    def forget_peak(self) -> None:
        """Begin a new peak."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def descriptors(self) -> int:
        """Return how many descriptors are open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class Neighbour(Thread):
    """A client that stores 200 B and fetches them, again and again, until it is stopped."""

    def __init__(self, target: Target) -> None:
        super().__init__(daemon=True)
        self.times_s: list[float] = []
        self.failed = 0
        self._target = target
        self._stopped = Event()

    def run(self) -> None:
        """Work, and pause a little between; once at least, however soon it is stopped."""
        while not self.times_s or not self._stopped.wait(0.1):
            began_s = time.monotonic()
            try:
                data = os.urandom(200)
                found = self._target.get(self._target.put(data, 200))
                self.failed += found != (200, zlib.crc32(data))
            except (OSError, HTTPException, RuntimeError):
                self.failed += 1
            self.times_s.append(time.monotonic() - began_s)

    def stop(self) -> None:
        """End it."""
        self._stopped.set()
        self.join()


def large_body(target: Target, options: argparse.Namespace) -> None:
    """Of so many gigabytes, up and down."""
    body = Stream(int(options.gb * 10**9), options.seed)
    cap = target.put(body, body.size)
    if target.get(cap) != (body.size, body.checksum):
        raise RuntimeError("other bytes came back")


def crowd(target: Target, options: argparse.Namespace) -> None:
    """So many clients at once, of which each stores a megabyte and fetches it."""

    def work(number: int) -> bool:
        body = Stream(BLOCK, options.seed + number)
        return target.get(target.put(body, body.size)) == (body.size, body.checksum)

    with ThreadPoolExecutor(options.clients) as pool:
        if not all(pool.map(work, range(options.clients))):
            raise RuntimeError("other bytes came back")


def hostile(target: Target, options: argparse.Namespace) -> None:
    """Clients that stop reading, leave in the middle, or send a byte per second; and idle connections."""
    body = Stream(options.large, options.seed)
    cap = target.put(body, body.size)
    fetch = f"GET /uri/{cap} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    store = b"PUT /uri HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    with contextlib.ExitStack() as stack:

        def open_socket() -> socket.socket:
            return stack.enter_context(contextlib.closing(target.raw()))

        for _ in range(options.idle):
            open_socket()
        for _ in range(options.hostile):
            stops = open_socket()
            stops.sendall(fetch)
            stops.recv(1000)
            for first in (fetch, store + bytes(500_000)):
                leaves = target.raw()
                leaves.sendall(first)
                leaves.close()
        slow = [open_socket() for _ in range(options.hostile)]
        for each in slow:
            each.sendall(store)
        until_s = time.monotonic() + options.seconds
        while time.monotonic() < until_s:
            for each in slow:
                each.sendall(b"x")
            time.sleep(1)


def left_behind(target: Target, descriptors: int) -> list[str]:
    """Return what is left when all clients have gone, after a while."""
    end_s = time.monotonic() + SETTLED_S
    while True:
        left = [f"tmp/{path.name}" for path in (target.directory / "tmp").glob("*")]
        more = target.descriptors() - descriptors
        if more > 5:  # of a log, a database, a directory
            left.append(f"{more} descriptors")
        incoming = list(target.directory.glob("**/incoming/*/*/*"))
        if incoming:
            left.append(f"{len(incoming)} unfinished shares")
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.5)


@contextlib.contextmanager
def neighbour_of(target: Target) -> Iterator[Neighbour]:
    """Run a client of small files meanwhile."""
    neighbour = Neighbour(target)
    neighbour.start()
    try:
        yield neighbour
    finally:
        neighbour.stop()


PARTS: dict[str, Callable[[Target, argparse.Namespace], None]] = {
    "large body": large_body,
    "crowd": crowd,
    "hostile": hostile,
}


def measure(options: argparse.Namespace) -> int:
    """Measure the parts chosen, and print each figure; returns the status."""
    bad = 0
    with (
        tempfile.TemporaryDirectory(dir=options.scratch) as scratch,
        Target(Path(scratch)) as target,
    ):
        for _ in range(20):
            target.get(target.put(os.urandom(200), 200))
        time.sleep(1)
        idle, descriptors = target.resident(), target.descriptors()
        for name, part in PARTS.items():
            if options.only and name not in options.only:
                continue
            target.forget_peak()
            began_s = time.monotonic()
            with neighbour_of(target) as neighbour:
                part(target, options)
            took_s = time.monotonic() - began_s
            above = target.resident("VmHWM") - idle
            left = left_behind(target, descriptors)
            kept = above <= MOST_ABOVE_IDLE and not left and not neighbour.failed
            bad += not kept
            figure = {
                "part": name,
                "above_idle_mib": round(above / _MIB, 1),
                "target_mib": MOST_ABOVE_IDLE // _MIB,
                "idle_mib": round(idle / _MIB, 1),
                "after_mib": round((target.resident() - idle) / _MIB, 1),
                "seconds": round(took_s, 1),
                "neighbour_median_s": round(statistics.median(neighbour.times_s), 3),
                "neighbour_worst_s": round(max(neighbour.times_s), 3),
                "neighbour_failed": neighbour.failed,
                "left": left,
                "kept": kept,
            }
            print(json.dumps(figure), flush=True)
    return 1 if bad else 0


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--idle", type=int, default=1000, help="idle connections")
    parser.add_argument("--hostile", type=int, default=60, help="clients of each hostile kind")
    parser.add_argument("--large", type=int, default=100_000_000, help="bytes that are not read")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they stay")
    parser.add_argument("--only", action="append", choices=list(PARTS))
    parser.add_argument("--scratch", type=scratch_directory, help="where the shares are")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.gb, options.clients, options.idle, options.hostile = 0.005, 5, 20, 2
        options.large, options.seconds = 2_000_000, 2.0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ending.end_on_sigterm()
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
