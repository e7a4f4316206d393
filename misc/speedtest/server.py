"""
What a storage server costs: requests and megabytes per second of its CPU time, over TLS on loopback.

    python misc/speedtest/server.py [--peer NURL --peer-pid PID] [--rounds 5]

A server of ours is started on a scratch directory, with durability ``batch``. Another GBS server, given by
NURL and process id, is measured in the same run, in turns (A B A B). The client is a raw one in this
process; it pipelines, checks every status, and every byte that it reads back.

One JSON line per scenario and server on stdout: median and spread over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pipegrid
from pipegrid.wire import gbs_cbor_bodies, gbs_paths_headers, server_address

SMALL_BYTES = 684
LARGE_BYTES = 1 << 20
_TICKS = os.sysconf("SC_CLK_TCK")

RUN = """
import sys
from pathlib import Path
from twisted.internet import reactor
from pipegrid.server.serve import ServeSettings, run
settings = ServeSettings(
    directory=Path(sys.argv[1]), port="tcp:0:interface=127.0.0.1", durability=sys.argv[2]
)
sys.exit(run(reactor, settings, lambda text: print(text, flush=True)))
"""


class Connection:
    """A TLS connection that writes requests while it reads answers."""

    def __init__(self, address: server_address.Nurl) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        raw = socket.create_connection((address.host, address.port))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = context.wrap_socket(raw)
        self._socket.setblocking(False)
        self._in = bytearray()

    def exchange(self, requests: Iterator[bytes], count: int, depth: int) -> Iterator[Any]:
        """Keep ``depth`` requests unanswered; yield (status, body) of each answer, in order."""
        out = memoryview(b"")
        sent = answered = 0
        while answered < count:
            while not out and sent < count and sent - answered < depth:
                # Many small requests go together, as a pipelining client sends them.
                burst, size = [], 0
                while sent < count and sent - answered < depth and size < 65536:
                    burst.append(next(requests))
                    size += len(burst[-1])
                    sent += 1
                out = memoryview(b"".join(burst))
            try:
                if out:
                    out = out[self._socket.send(out) :]
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                pass
            got = False
            try:
                data = self._socket.recv(262144)
                if not data:
                    raise ConnectionError("the server closed the connection")
                self._in += data
                got = True
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
            for answer in self._answers():
                answered += 1
                got = True
                yield answer
            if not got:
                select.select([self._socket], [self._socket] if out else [], [], 5)

    def _answers(self) -> Iterator[tuple[int, bytes]]:
        while True:
            end = self._in.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._in[:end]).lower()
            status = int(head[9:12])
            at = end + 4
            if b"transfer-encoding: chunked" in head:
                body = bytearray()
                while True:
                    line_end = self._in.find(b"\r\n", at)
                    if line_end < 0:
                        return
                    size = int(self._in[at:line_end], 16)
                    at = line_end + 2
                    if len(self._in) < at + size + 2:
                        return
                    body += self._in[at : at + size]
                    at += size + 2
                    if not size:
                        break
            else:
                _, found, rest = head.partition(b"content-length:")
                size = int(rest.split(b"\r\n")[0]) if found else 0
                if len(self._in) < at + size:
                    return
                body = self._in[at : at + size]
                at += size
            del self._in[:at]
            yield status, bytes(body)

    def close(self) -> None:
        """Close it."""
        self._socket.close()


class Server:
    """One server to be measured."""

    def __init__(self, name: str, address: str, pid: int) -> None:
        self.name = name
        self.address = server_address.parse_nurl(address)
        self.pid = pid
        self._authorization = b"Authorization: " + gbs_paths_headers.authorization(
            self.address.swissnum
        )

    def cpu_s(self) -> float:
        """Return the CPU time that its process has used so far, with all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def request(self, method: str, path: str, *lines: bytes, body: bytes = b"") -> bytes:
        """Return a request."""
        heads = [f"{method} {path} HTTP/1.1".encode(), b"Host: x", self._authorization, *lines]
        if method != "GET":
            heads.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join(heads) + b"\r\n\r\n" + body

    def allocate(self, index: bytes, share_bytes: int) -> bytes:
        """Return the request for room for one share."""
        body = gbs_cbor_bodies.pack_allocate({0}, share_bytes)
        secrets = {
            gbs_paths_headers.RENEW_SECRET: b"r" * 32,
            gbs_paths_headers.CANCEL_SECRET: b"c" * 32,
            gbs_paths_headers.UPLOAD_SECRET: b"u" * 32,
        }
        lines = [
            b"X-Tahoe-Authorization: " + line for line in gbs_paths_headers.secret_lines(secrets)
        ]
        return self.request("POST", gbs_paths_headers.allocate_path(index), *lines, body=body)

    def write(self, index: bytes, offset: int, data: bytes) -> bytes:
        """Return the request that writes data."""
        secret = gbs_paths_headers.secret_lines({gbs_paths_headers.UPLOAD_SECRET: b"u" * 32})[0]
        where = gbs_paths_headers.format_content_range(offset, offset + len(data))
        lines = (b"X-Tahoe-Authorization: " + secret, b"Content-Range: " + where)
        return self.request("PATCH", gbs_paths_headers.share_path(index, 0), *lines, body=data)

    def read(self, index: bytes, begin: int, end: int) -> bytes:
        """Return the request for part of a share."""
        line = b"Range: " + gbs_paths_headers.format_range(begin, end)
        return self.request("GET", gbs_paths_headers.share_path(index, 0), line)


def small_shares(server: Server, rng: random.Random, count: int) -> tuple[float, float]:
    """Allocate and write small shares, all pipelined; returns (requests, wall seconds)."""
    data = rng.randbytes(SMALL_BYTES)

    def requests() -> Iterator[bytes]:
        for _ in range(count):
            index = rng.randbytes(16)
            yield server.allocate(index, SMALL_BYTES)
            yield server.write(index, 0, data)

    connection = Connection(server.address)
    began = time.monotonic()
    statuses = [status for status, _ in connection.exchange(requests(), 2 * count, 200)]
    took = time.monotonic() - began
    assert statuses == [200, 201] * count, set(statuses)
    connection.close()
    return 2 * count, took


def large_writes(server: Server, rng: random.Random, count: int) -> tuple[float, float]:
    """Write one share in bodies of 1 MiB; returns (megabytes, wall seconds)."""
    index, data = rng.randbytes(16), rng.randbytes(LARGE_BYTES)
    _LAST[server.name] = index, data, count

    def requests() -> Iterator[bytes]:
        yield server.allocate(index, count * LARGE_BYTES)
        for number in range(count):
            yield server.write(index, number * LARGE_BYTES, data)

    connection = Connection(server.address)
    began = time.monotonic()
    statuses = [status for status, _ in connection.exchange(requests(), count + 1, 4)]
    took = time.monotonic() - began
    assert statuses == [200] * count + [201], statuses
    connection.close()
    return count * LARGE_BYTES / 1e6, took


_LAST: dict[str, tuple[bytes, bytes, int]] = {}


def large_reads(server: Server, rng: random.Random, count: int) -> tuple[float, float]:
    """Read it back in ranges of 1 MiB, one at a time; returns (megabytes, wall seconds)."""
    index, data, count = _LAST[server.name]
    requests = (
        server.read(index, number * LARGE_BYTES, (number + 1) * LARGE_BYTES)
        for number in range(count)
    )
    connection = Connection(server.address)
    began = time.monotonic()
    for status, body in connection.exchange(requests, count, 1):
        assert status == 206
        assert body == data
    took = time.monotonic() - began
    connection.close()
    return count * LARGE_BYTES / 1e6, took


SCENARIOS: dict[str, tuple[Callable[..., tuple[float, float]], str, int]] = {
    "allocate + write 684 B": (small_shares, "requests", 2000),
    "PATCH 1 MiB": (large_writes, "MB", 64),
    "GET 1 MiB": (large_reads, "MB", 64),
}


def measure(servers: list[Server], rounds: int, seed: int, scale: float) -> list[dict[str, Any]]:
    """Return one result for each scenario and server; turns alternate, the first one does not count."""
    rng = random.Random(seed)
    results = []
    for name, (scenario, unit, count) in SCENARIOS.items():
        rates: dict[str, list[float]] = {server.name: [] for server in servers}
        walls: dict[str, list[float]] = {server.name: [] for server in servers}
        for turn in range(rounds + 1):
            for server in servers:
                before = server.cpu_s()
                amount, took = scenario(server, rng, max(1, int(count * scale)))
                cpu_s = max(server.cpu_s() - before, 1 / _TICKS)
                if turn:
                    rates[server.name].append(amount / cpu_s)
                    walls[server.name].append(amount / took)
        for server in servers:
            values = sorted(rates[server.name])
            result: dict[str, Any] = {
                "scenario": name,
                "server": server.name,
                "unit": f"{unit} per CPU second",
                "median": round(statistics.median(values), 1),
                "spread": [round(values[0], 1), round(values[-1], 1)],
                "per_wall_second": round(statistics.median(walls[server.name]), 1),
                "rounds": rounds,
                "seed": seed,
            }
            ours = rates[servers[0].name]
            if server is not servers[0]:
                ratio = statistics.median(ours) / statistics.median(values)
                result["ours_is_times_as_fast"] = round(ratio, 2)
            results.append(result)
    return results


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="What a storage server costs.")
    parser.add_argument("--peer", metavar="NURL", help="another GBS server")
    parser.add_argument("--peer-pid", type=int, metavar="PID", help="its process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the usual amounts")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--durability", default="batch")
    parser.add_argument("--profile", metavar="FILE", help="write our server's profile there")
    options = parser.parse_args(arguments)
    if options.peer and not options.peer_pid:
        parser.error("--peer needs --peer-pid")
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable]
        if options.profile:
            command += ["-m", "cProfile", "-o", options.profile]
        script = Path(scratch) / "run.py"
        script.write_text(RUN)
        command += [str(script), scratch, options.durability]
        source = str(Path(pipegrid.__file__).parent.parent)
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": source},
        )
        try:
            assert process.stdout is not None
            servers = [Server("pipegrid", process.stdout.readline().strip(), process.pid)]
            if options.peer:
                servers.append(Server("peer", options.peer, options.peer_pid))
            for result in measure(servers, options.rounds, seed, options.scale):
                print(json.dumps(result), flush=True)
        finally:
            process.terminate()
            process.wait(15)


if __name__ == "__main__":
    main()
