"""
Does a put that was cut off send only what is missing when it is run again?

The real command puts a file on storage servers that are processes of their own, PipeGrid's or Tahoe-LAFS's
(``$TAHOE`` is the command), through a proxy that counts what each server is sent. When 54 % of all share
bytes have passed, the command gets SIGINT or SIGKILL; then, perhaps, a server is restarted; then the same
command is run again. What must hold:

* each server is sent at most what it lacked and a window (``WINDOW_BYTES``), and 1 % for TLS and heads;
* the command ends well, with a share on each server and nothing unfinished on any;
* ``get`` brings the file back; with a random key no note is left.

What a server has when the command has gone is read from its disk: ours keep a note beside an unfinished
share, and of Tahoe-LAFS's share the rest is a hole in the file. A server of Tahoe-LAFS's that is restarted
has nothing.

    python -m misc.soak.resume [--kind pipegrid|tahoe] [--servers N] [--size BYTES] [--seed S]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import attrs

from misc.command import command, environment
from misc.ending import end_on_sigterm
from misc.soak.kill_put import Violation
from misc.speedtest.peers.nodes import HTTPS, StorageNode, servers_file, stop
from misc.speedtest.processes import LOOPBACK
from pipegrid.core.encoding_parameters import Params
from pipegrid.flow.window import INITIAL_BYTES
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.grid.file_grid import NOTES_NAME
from pipegrid.storage import share_file
from pipegrid.storage.uploads import incoming_files

PIPEGRID = "pipegrid"
TAHOE_LAFS = "tahoe"
KINDS = (PIPEGRID, TAHOE_LAFS)
CUT_AT = 0.54
REQUIRED = 3
MESSAGE_BYTES = 1 << 20
BLOCK_BYTES = (1 << 20) // REQUIRED + 1
WINDOW_BYTES = INITIAL_BYTES + MESSAGE_BYTES + 2 * BLOCK_BYTES
"""
What may leave before the first answer: the first window, the message that overfills it, and the block that
overfills the message; and the block that was torn when the put was cut off.
"""
OVERHEAD = 0.01
HANDSHAKE_BYTES = 20_000
TIMEOUT_S = 600.0
_PIECE_BYTES = 1 << 18
_SETTLE_S = 0.3
_PAGES_BYTES = 2 * 4096
"""Those of a container's header and of its lease hold little of the share."""


class PipegridNode(StorageNode):
    """A storage server of ours, always at the same address."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        for name in ("tahoe.cfg", "tahoe-client.tac"):
            (directory / name).unlink()

    def start(self) -> None:
        """Start it; nothing is waited for."""
        with open(self.directory.with_suffix(".log"), "ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pipegrid.speedtest.end_with_parent", "pipegrid.cli"),
                    *("-d", str(self.directory), "serve"),
                    *("--port", f"tcp:{self.port}:interface={LOOPBACK}"),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(),
            )


def unfinished(node: StorageNode) -> list[Path]:
    """Return what lies in ``incoming``."""
    return [path for path in (node.shares / "incoming").rglob("*") if path.is_file()]


def stored_bytes(node: StorageNode) -> int:
    """Return how much share data a server has, whole shares and unfinished ones."""
    ours = isinstance(node, PipegridNode)
    there = 0
    for path in node.shares.rglob("*"):
        if not path.is_file():
            continue
        if "incoming" not in path.relative_to(node.shares).parts:
            with open(path, "rb") as file:
                header = share_file.parse_header(file.read(share_file.HEADER_BYTES))
            there += share_file.leases_offset(header, path.stat().st_size) - share_file.HEADER_BYTES
        elif not ours:
            there += max(0, _written_bytes(path) - _PAGES_BYTES)
        elif path.name.endswith(incoming_files.SUFFIX):
            there += sum(
                end - begin for begin, end in incoming_files.parse_note(path.read_bytes()).ranges
            )
    return there


def _written_bytes(path: Path) -> int:
    """Return how much of a file is no hole, in whole pages."""
    written = end = 0
    with open(path, "rb") as file, suppress(OSError):  # ENXIO: there is nothing more
        while True:
            begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            written += end - begin
    return written


class Proxy:
    """
    Relays to one server, in threads, and counts.

    Attributes:
        port: to connect to.
        sent_bytes: to the server, so far.
    """

    def __init__(self, target_port: int, passed: Callable[[int], None]) -> None:
        self.sent_bytes = 0
        self._target_port = target_port
        self._passed = passed
        self._listener = socket.create_server((LOOPBACK, 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection((LOOPBACK, self._target_port))
                except OSError:
                    near.close()
                    continue
                self._open |= {near, far}
                for source, sink, counts in ((near, far, True), (far, near, False)):
                    threading.Thread(
                        target=self._relay, args=(source, sink, counts), daemon=True
                    ).start()

    def _relay(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                if counts:
                    self.sent_bytes += len(data)
                    self._passed(len(data))
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def disconnect(self) -> None:
        """Close all connections."""
        for each in self._open:
            each.close()
        self._open.clear()

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.disconnect()


@attrs.frozen
class Round:
    """
    How a put is cut off.

    Attributes:
        signal: that the command gets.
        restart: whether a server is restarted before the command is run again.
        random_key: whether the put has a random key.
    """

    kind: str
    signal: signal.Signals
    restart: bool
    random_key: bool = False

    def __str__(self) -> str:
        more = ", a server restarted" * self.restart + ", random key" * self.random_key
        return f"{self.kind}, {self.signal.name}{more}"


@attrs.frozen
class Figures:
    """What a round has shown, in bytes of all servers; ``waste`` is the most of one server."""

    whole: int
    missing: int
    sent: int
    waste: int


class Servers:
    """Storage servers of one kind, each behind a proxy, and a client of them."""

    def __init__(self, kind: str, count: int, scratch: Path) -> None:
        make: Any = PipegridNode if kind == PIPEGRID else StorageNode
        self.nodes: list[StorageNode] = [make(scratch / f"{kind}{n:02}") for n in range(count)]
        self.client = scratch / f"client-{kind}"
        self._lock = threading.Lock()
        self._left = 0
        self._cut: Callable[[], None] | None = None
        self.proxies: list[Proxy] = []
        try:
            for node in self.nodes:
                node.start()
            for node in self.nodes:
                node.wait()
            self.proxies = [Proxy(node.port, self._passed) for node in self.nodes]
        except BaseException:
            self.close()
            raise
        params = Params(REQUIRED, count)
        create_client(self.client, params=params, happy=count, files={SERVERS_NAME: ""})
        self.speak(HTTPS)

    def speak(self, protocol: str) -> None:
        """Let the client speak to them in this way from now on."""
        addresses = [
            node.address().at(proxy.port)
            for node, proxy in zip(self.nodes, self.proxies, strict=True)
        ]
        (self.client / SERVERS_NAME).write_text(servers_file(addresses, protocol), "utf-8")

    def close(self) -> None:
        """End all of it."""
        for proxy in self.proxies:
            proxy.close()
        stop(self.nodes)

    def _passed(self, length: int) -> None:
        with self._lock:
            self._left -= length
            due, cut = self._left <= 0, self._cut
            if due:
                self._cut = None
        if due and cut is not None:
            cut()

    def put(
        self, path: Path, random_key: bool, cut: signal.Signals | None = None
    ) -> tuple[int, str, str]:
        """
        Run ``put``; returns status, standard output and standard error.

        Args:
            cut: the signal that it gets in the middle.
        """
        with self._lock:
            self._left = int(CUT_AT * path.stat().st_size * len(self.nodes) / REQUIRED)
        options = ["--random-key"] if random_key else []
        process = subprocess.Popen(
            command(self.client, "put", "--json", *options, str(path)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        if cut is not None:
            number = cut
            self._cut = lambda: process.send_signal(number)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise Violation(f"put hung for {TIMEOUT_S:g} s") from None
        return process.returncode, out, err

    def settle(self) -> None:
        """Let servers work off what they have received."""
        before = -1
        while (now := sum(map(stored_bytes, self.nodes))) != before:
            before = now
            time.sleep(_SETTLE_S)

    def restart(self, node: StorageNode) -> None:
        """End a server and start it again."""
        node.signal(signal.SIGTERM)
        node.wait_stopped()
        node.start()
        node.wait()


def play(servers: Servers, what: Round, size: int, rng: random.Random) -> Figures:
    """
    Do one round; nothing is left on the servers.

    Raises:
        Violation: a promise was broken.
    """
    try:
        return _play(servers, what, size, rng)
    finally:
        for node in servers.nodes:
            node.forget()


def _play(servers: Servers, what: Round, size: int, rng: random.Random) -> Figures:
    path = servers.client / "file"
    pieces = [rng.randbytes(min(_PIECE_BYTES, size - at)) for at in range(0, size, _PIECE_BYTES)]
    path.write_bytes(content := b"".join(pieces))
    status, out, err = servers.put(path, what.random_key, what.signal)
    expected = 130 if what.signal == signal.SIGINT else -what.signal
    if status != expected or out:
        raise Violation(f"the put that was cut off gave {status}, {out!r} and {err!r}")
    servers.settle()
    if what.restart:
        servers.restart(rng.choice(servers.nodes))
    there = [stored_bytes(node) for node in servers.nodes]
    for proxy in servers.proxies:
        proxy.disconnect()
        proxy.sent_bytes = 0
    status, out, err = servers.put(path, what.random_key)
    if status or err:
        raise Violation(f"the rerun gave {status}, and said {err!r}")
    told = json.loads(out)
    servers.settle()
    sent = [proxy.sent_bytes for proxy in servers.proxies]
    waste = [
        sent_bytes - HANDSHAKE_BYTES - int((1 + OVERHEAD) * (told["share_bytes"] - has))
        for sent_bytes, has in zip(sent, there, strict=True)
    ]
    figures = Figures(
        len(there) * told["share_bytes"],
        len(there) * told["share_bytes"] - sum(there),
        sum(sent),
        max(waste),
    )
    if max(waste) > WINDOW_BYTES:
        raise Violation(
            f"a server was sent {max(waste)} bytes too many: {figures}, {there}, {sent}"
        )
    left = [str(path) for node in servers.nodes for path in unfinished(node)]
    left += map(str, servers.client.glob(f"private/{NOTES_NAME}/*"))
    if left or told["happiness"] != len(there):
        raise Violation(f"happiness {told['happiness']}; left behind: {left}")
    got = subprocess.run(
        command(servers.client, "get", told["cap"]),
        capture_output=True,
        env=environment(),
        timeout=TIMEOUT_S,
    )
    if got.returncode or got.stdout != content:
        raise Violation(f"get gave {got.returncode}: {got.stderr.decode('utf-8', 'replace')}")
    return figures


def rounds(kind: str) -> list[Round]:
    """Return the ways in which puts are cut off."""
    return [
        *(
            Round(kind, number, restart)
            for number in (signal.SIGINT, signal.SIGKILL)
            for restart in (False, True)
        ),
        Round(kind, signal.SIGKILL, False, random_key=True),
    ]


def run(todo: Sequence[Round], count: int, size: int, seed: int, scratch: Path, out: TextIO) -> int:
    """Do some rounds; returns 0 if no promise was broken."""
    rng = random.Random(seed)
    print(f"resume: {len(todo)} puts of {size} bytes, {count} servers, seed {seed}", file=out)
    broken = 0
    for kind in dict.fromkeys(each.kind for each in todo):
        servers = Servers(kind, count, scratch)
        try:
            for each in todo:
                if each.kind != kind:
                    continue
                try:
                    found = play(servers, each, size, rng)
                except Violation as violation:
                    broken += 1
                    print(f"{each}\n  {violation}", file=out, flush=True)
                    continue
                print(
                    f"{each}: of {found.whole / 1e6:.1f} MB {found.missing / 1e6:.1f} were missing, "
                    f"{found.sent / 1e6:.1f} were sent (at most {found.waste / 1e6:.2f} too many a server)",
                    file=out,
                    flush=True,
                )
        finally:
            servers.close()
    print(f"{broken:6d} promises broken", file=out)
    return 1 if broken else 0


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--kind", action="append", choices=KINDS, help="[pipegrid]")
    parser.add_argument("--servers", type=int, default=10, help="[10]")
    parser.add_argument("--size", type=int, default=60_000_000, help="bytes of the file [60000000]")
    parser.add_argument("--seed", type=int, default=None, help="[a new one]")
    options = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    todo = [each for kind in options.kind or (PIPEGRID,) for each in rounds(kind)]
    end_on_sigterm()
    # A shell starts what runs in its background with SIGINT ignored, and so would the puts be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="pipegrid-resume-") as scratch:
        return run(todo, options.servers, options.size, seed, Path(scratch), out)


if __name__ == "__main__":
    sys.exit(main())
