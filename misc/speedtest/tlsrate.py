"""
What TLS itself can do here: plain streams from one process to as many as there are storage servers.

    python -m misc.speedtest.tlsrate [--streams 10] [--megabytes 300] [--rounds 5]

The ceiling of everything that goes over HTTPS: one thread of this process writes to all streams, or reads
from all, in pieces of 64 KiB, as its sockets take and give them; at the other end of each is a process that
reads, or writes, and does nothing else. No framing, no files, no hashes; OpenSSL through Python's own
``ssl``, keys and ciphers as those of the storage servers.

One JSON line for each direction: median and spread over the rounds, in megabytes per second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import socket
import ssl
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from misc.ending import end_on_sigterm
from misc.speedtest import processes

PIECE_BYTES = 64 * 1024
COMMAND = struct.Struct(">cQ")
WRITE, READ, DONE = b"W", b"R", b"."


class TlsStreams:
    """
    Streams to as many processes, which live as long as this is entered.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._stack = contextlib.ExitStack()
        self._streams: list[ssl.SSLSocket] = []
        self.pids: list[int] = []

    def __enter__(self) -> TlsStreams:
        with self._stack:
            scratch = self._stack.enter_context(tempfile.TemporaryDirectory())
            program = ["-m", "misc.speedtest.tlsrate"]
            command = [sys.executable, *program, "--receive", make_certificate(Path(scratch))]
            running = [
                self._stack.enter_context(processes.running(command)) for _ in range(self._count)
            ]
            self.pids = [process.pid for process in running]
            for process in running:
                port = int(processes.first_line(process))
                self._streams.append(self._stack.enter_context(connect(port)))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, total_bytes: int, streams: int | None = None) -> float:
        """Write so many bytes over all streams (or the first few); returns the seconds it took."""
        return self._run(WRITE, total_bytes, self._streams[:streams])

    def read(self, total_bytes: int, streams: int | None = None) -> float:
        """Read so many bytes over all streams (or the first few); returns the seconds it took."""
        return self._run(READ, total_bytes, self._streams[:streams])

    def _run(self, what: bytes, total_bytes: int, streams: Sequence[ssl.SSLSocket]) -> float:
        each = total_bytes // len(streams)
        began = time.perf_counter()
        for stream in streams:
            stream.setblocking(True)
            stream.sendall(COMMAND.pack(what, each))
            stream.setblocking(False)
        if what == WRITE:
            write_all(streams, each)
        else:
            read_all(streams, each)
        for stream in streams:
            stream.setblocking(True)
            if stream.recv(1) != DONE:
                raise ConnectionError("a stream ended early")
        return time.perf_counter() - began


def write_all(streams: Sequence[ssl.SSLSocket], each: int) -> None:
    """Write so many bytes to each stream, as they take them."""
    piece = memoryview(os.urandom(PIECE_BYTES))
    left = dict.fromkeys(streams, each)
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_WRITE)
        while left:
            for key, _ in selector.select():
                stream = cast(ssl.SSLSocket, key.fileobj)
                with contextlib.suppress(ssl.SSLWantWriteError):
                    left[stream] -= stream.send(piece[: left[stream]])
                if not left[stream]:
                    del left[stream]
                    selector.unregister(stream)


def read_all(streams: Sequence[ssl.SSLSocket], each: int) -> None:
    """Read so many bytes from each stream, as they come."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    left = dict.fromkeys(streams, each)
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while left:
            for key, _ in selector.select():
                stream = cast(ssl.SSLSocket, key.fileobj)
                with contextlib.suppress(ssl.SSLWantReadError):
                    # What OpenSSL has read already no selector sees: take all of it.
                    while left[stream]:
                        received = stream.recv_into(buffer[: left[stream]])
                        if not received:
                            raise ConnectionError("a stream ended early")
                        left[stream] -= received
                if not left[stream]:
                    del left[stream]
                    selector.unregister(stream)


def connect(port: int) -> ssl.SSLSocket:
    """Return a connection to a receiver."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    raw = socket.create_connection((processes.LOOPBACK, port))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(raw)


def make_certificate(directory: Path) -> str:
    """Make what storage servers make for themselves; returns the file's path."""
    from pipegrid.server.identity import load_or_create

    load_or_create(directory)
    return str(directory / "private" / "node.pem")


def receive(certificate: str) -> None:
    """The other end of one stream: do as told until it is closed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server((processes.LOOPBACK, 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        raw, _ = listening.accept()
    buffer = memoryview(bytearray(PIECE_BYTES))
    piece = memoryview(os.urandom(PIECE_BYTES))
    with context.wrap_socket(raw, server_side=True) as stream, contextlib.suppress(OSError):
        while command := stream.recv(COMMAND.size):
            while len(command) < COMMAND.size:
                command += stream.recv(COMMAND.size - len(command))
            what, left = COMMAND.unpack(command)
            while left:
                size = min(left, PIECE_BYTES)
                moved = (
                    stream.recv_into(buffer[:size]) if what == WRITE else stream.send(piece[:size])
                )
                if not moved:
                    return
                left -= moved
            stream.sendall(DONE)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print, or be the other end."""
    parser = argparse.ArgumentParser(description="How fast TLS is here.")
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--megabytes", type=int, default=300, help="a round, over all streams")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--receive", metavar="CERTIFICATE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.receive:
        receive(options.receive)
        return
    end_on_sigterm()
    total_bytes = options.megabytes * 10**6
    rates: dict[str, list[float]] = {"write": [], "read": []}
    with TlsStreams(options.streams) as streams:
        for turn in range(options.rounds + 1):
            for name, run in (("write", streams.write), ("read", streams.read)):
                took = run(total_bytes)
                if turn:  # the first one warms up
                    rates[name].append(total_bytes / 1e6 / took)
    for name, values in rates.items():
        result = {
            "scenario": f"TLS, {name}",
            "streams": options.streams,
            "unit": "MB per second",
            "median": round(statistics.median(values), 1),
            "spread": [round(min(values), 1), round(max(values), 1)],
            "rounds": options.rounds,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
