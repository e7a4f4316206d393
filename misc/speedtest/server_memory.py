"""
How much memory one storage server takes for many slow uploads at once.

    python -m misc.speedtest.server_memory [--uploads 200] [--megabytes 10] [--scratch DIR]

So many TLS connections to one ``pipegrid serve`` process; each allocates a share and writes it, in bodies of
1 MiB and then, to another server, in one body. All get on at the same pace, some kilobytes in turn, so that
every body is open for almost as long as the test lasts. At the end everything must have been stored.

One JSON line for each way of writing: the largest resident memory of the process (VmHWM), what it had before
the first connection, and the target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from misc.ending import end_on_sigterm
from misc.scratch import scratch_directory
from misc.speedtest.processes import Servers
from misc.speedtest.server import Server
from pipegrid.core.hashes import Buffer

TARGET_MIB = 128
TIMEOUT_S = 120.0
BODY_BYTES = 1 << 20
PIECE_BYTES = 50_000  # no multiple of anything: records, pages and bodies end where they like


class SlowUpload:
    """One connection, one share, and a piece of it whenever it is asked for."""

    def __init__(self, server: Server, rng: random.Random, content: bytes, body_bytes: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        raw = socket.create_connection((server.address.host, server.address.port))
        raw.settimeout(TIMEOUT_S)
        self._socket = context.wrap_socket(raw)
        self._pieces = pieces(server, rng.randbytes(16), content, body_bytes)
        self._answers = 1 + -(-len(content) // body_bytes)

    def send(self) -> bool:
        """Send a piece; returns whether there was one."""
        piece = next(self._pieces, None)
        if piece is not None:
            self._socket.sendall(piece)
        return piece is not None

    def check(self) -> None:
        """Read all answers; raise AssertionError unless the share was stored."""
        answers = b""
        while b"HTTP/1.1 201 " not in answers:
            data = self._socket.recv(65536)
            assert data, f"the server closed the connection: {answers[-200:]!r}"
            answers += data
        assert answers.count(b"HTTP/1.1 200 ") == self._answers - 1, answers[:200]

    def close(self) -> None:
        """Close it."""
        self._socket.close()


def pieces(server: Server, index: bytes, content: bytes, body_bytes: int) -> Iterator[Buffer]:
    """Yield all requests of an upload, a little at a time; the content is not copied as a whole."""
    yield server.allocate(index, len(content))
    view = memoryview(content)
    for offset in range(0, len(content), body_bytes):
        body = content[offset : offset + body_bytes]
        yield server.write(index, offset, body)[: -len(body)]
        for begin in range(offset, offset + len(body), PIECE_BYTES):
            yield view[begin : min(begin + PIECE_BYTES, offset + len(body))]


def measure(
    uploads: int, share_bytes: int, body_bytes: int, scratch: Path | None
) -> dict[str, Any]:
    """Return the result of one way of writing."""
    rng = random.Random()
    content = rng.randbytes(share_bytes)
    with Servers(1, scratch=scratch) as servers, contextlib.ExitStack() as stack:
        [process] = servers.processes
        server = Server("pipegrid", str(servers.addresses[0]), process.pid)
        before_bytes = servers.peak_bytes()
        running = []
        for _ in range(uploads):
            running.append(SlowUpload(server, rng, content, body_bytes))
            stack.callback(running[-1].close)
        connected_bytes = servers.peak_bytes()
        # All in turn, so that none is done before the last has almost all.
        while [upload.send() for upload in running].count(True):
            pass
        for upload in running:
            upload.check()
        return {
            "scenario": f"{uploads} uploads of {share_bytes / 1e6:g} MB",
            "body_bytes": body_bytes,
            "unit": "MiB resident, peak",
            "peak": servers.peak_bytes() >> 20,
            "connected": connected_bytes >> 20,
            "before": before_bytes >> 20,
            "target": TARGET_MIB,
        }


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="A storage server's memory under slow uploads.")
    parser.add_argument("--uploads", type=int, default=200)
    parser.add_argument("--megabytes", type=float, default=10.0, help="of each share")
    parser.add_argument(
        "--scratch", type=scratch_directory, help="where the server's directory is made"
    )
    options = parser.parse_args(arguments)
    end_on_sigterm()
    share_bytes = int(options.megabytes * 10**6)
    for body_bytes in (BODY_BYTES, share_bytes):
        result = measure(options.uploads, share_bytes, body_bytes, options.scratch)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
