"""
Tahoe-LAFS's own processes on loopback: storage servers that can be stopped, killed and started again, and
gateways.

``$TAHOE`` says where its command is, installed in an environment of its own; its code is never imported. A
node's directory is made by hand, as its documentation describes one: that is quicker than its own command,
ten times. Each node ends when its standard input does, so none outlives this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from misc.speedtest.processes import LOOPBACK, ROOT
from pipegrid.core import base32
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.server import identity
from pipegrid.wire.server_address import Furl, Nurl

TAHOE = os.environ.get("TAHOE", str(ROOT / ".venv-tahoe" / "bin" / "tahoe"))
HTTPS = "https"
FOOLSCAP = "foolscap"
PROTOCOLS = (HTTPS, FOOLSCAP)
START_S = 120.0
STOP_S = 20.0
REQUEST_S = 600.0
_PORTS = range(10_000, 32_000)  # none of those that the kernel gives to connections


class GatewayFailed(Exception):
    """The gateway answered that it could not do it; under load its patience with servers ends."""


def free_port() -> int:
    """Return a port that nobody uses just now."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((LOOPBACK, port))
            return port
    raise RuntimeError(f"no port from {_PORTS.start} to {_PORTS.stop} is free")


@attrs.frozen
class Address:
    """Where a storage server is, by either protocol."""

    nickname: str
    nurl: Nurl
    furl: Furl

    def at(self, port: int) -> Address:
        """Return the address of the same server behind another port of this machine."""
        return attrs.evolve(
            self,
            nurl=attrs.evolve(self.nurl, host=LOOPBACK, port=port),
            furl=attrs.evolve(self.furl, hints=(f"tcp:{LOOPBACK}:{port}",)),
        )


def servers_file(addresses: Sequence[Address], protocol: str) -> str:
    """Return a ``servers.yaml`` (JSON is YAML) that names servers for clients of either kind."""
    storage: dict[str, Any] = {}
    for each in addresses:
        fields: dict[str, Any] = {
            "nickname": each.nickname,
            "anonymous-storage-FURL": str(each.furl),
        }
        if protocol == HTTPS:
            fields["anonymous-storage-NURLs"] = [str(each.nurl)]
        storage[f"v0-{base32.encode(each.nickname.encode().ljust(32))}"] = {"ann": fields}
    return json.dumps({"storage": storage})


class Node:
    """
    One node, which runs while it is wanted.

    Args:
        directory: made unless it is there; its log is beside it, and what it has for a moment within it: each
            answer of a storage server is a temporary file.
        settings: of ``tahoe.cfg``.
    """

    def __init__(self, directory: Path, settings: str) -> None:
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        (directory / "private").mkdir(parents=True, exist_ok=True)
        self._temporary = directory / "tmp"
        self._temporary.mkdir(exist_ok=True)
        (directory / "tahoe.cfg").write_text(settings)
        (directory / "tahoe-client.tac").touch()  # tells what kind of node it is

    @property
    def pid(self) -> int:
        """Of its process, which runs."""
        assert self._process is not None, f"{self.directory.name} does not run"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._process is not None

    def start(self) -> None:
        """Start it; nothing is waited for."""
        assert self._process is None, f"{self.directory.name} runs already"
        with open(self.directory.with_suffix(".log"), "ab") as log:
            self._process = subprocess.Popen(
                [TAHOE, "run", str(self.directory)],
                env=os.environ | {"TMPDIR": str(self._temporary)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait_stopped(self) -> None:
        """Return when its process has ended; it is made to if it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for something that it should do."""
        end_s = time.monotonic() + START_S
        while not ready():
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > end_s:
                log = self.directory.with_suffix(".log").read_text("utf-8", "replace")
                raise RuntimeError(f"no {what} of {self.directory.name}: {log[-2000:]}")
            time.sleep(0.02)


class StorageNode(Node):
    """A storage server of Tahoe-LAFS; it speaks both protocols, always at the same address."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        listening = (
            f"tub.port = tcp:{self.port}:interface={LOOPBACK}\n"
            f"tub.location = tcp:{LOOPBACK}:{self.port}\n"
        )
        super().__init__(
            directory,
            f"[node]\nnickname = {directory.name}\nweb.port =\n{listening}"
            "[client]\n[storage]\nenabled = true\nreserved_space = 0\n",
        )

    @property
    def shares(self) -> Path:
        """The directory with its shares."""
        return self.directory / "storage" / "shares"

    def wait(self) -> None:
        """Return when it can be used."""
        self.until((self.directory / "private" / "storage.furl").exists, "fURL")
        self.until(self._listens, "open port")

    def _listens(self) -> bool:
        try:
            socket.create_connection((LOOPBACK, self.port), 1.0).close()
        except OSError:
            return False
        return True

    def address(self) -> Address:
        """Return where it is; it must have run once."""
        known = identity.load_or_create(self.directory)
        nurl, furl = known.nurl(LOOPBACK, self.port), known.furl([f"tcp:{LOOPBACK}:{self.port}"])
        return Address(self.directory.name, nurl, furl)

    def forget(self) -> None:
        """Remove all whole shares behind its back; it looks into its directories anew each time."""
        if self.shares.is_dir():
            for path in self.shares.iterdir():
                if path.name != "incoming":
                    shutil.rmtree(path)


class StorageNodes:
    """So many storage servers while this is entered."""

    def __init__(self, scratch: Path, count: int) -> None:
        self.nodes = [StorageNode(scratch / f"tahoe{number:02}") for number in range(count)]

    def __enter__(self) -> StorageNodes:
        try:
            for node in self.nodes:
                node.start()
            for node in self.nodes:
                node.wait()
        except BaseException:
            stop(self.nodes)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stop(self.nodes)

    def addresses(self) -> list[Address]:
        """Return where they are."""
        return [node.address() for node in self.nodes]

    def forget(self) -> None:
        """Remove all shares."""
        for node in self.nodes:
            node.forget()


def stop(nodes: Sequence[Node]) -> None:
    """End nodes, side by side."""
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        node.wait_stopped()


class Gateway(Node):
    """A client of Tahoe-LAFS, with its web gateway; entered, it is connected to all its servers."""

    def __init__(
        self,
        directory: Path,
        addresses: Sequence[Address],
        protocol: str,
        params: Params,
        happy: int,
    ) -> None:
        self._port = free_port()
        self._servers = len(addresses)
        super().__init__(
            directory,
            f"[node]\nweb.port = tcp:{self._port}:interface={LOOPBACK}\n"
            "tub.port = disabled\ntub.location = disabled\n"
            f"[client]\nshares.needed = {params.required_shares}\nshares.happy = {happy}\n"
            f"shares.total = {params.total_shares}\nforce_foolscap = {protocol == FOOLSCAP}\n"
            "[storage]\nenabled = false\n",
        )
        path = directory / SERVERS_NAME
        path.write_text(servers_file(addresses, protocol), "utf-8")

    def __enter__(self) -> Gateway:
        try:
            self.start()
            self.until((self.directory / "node.url").exists, "web gateway")
            self.until(lambda: self.connected() == self._servers, f"{self._servers} connections")
        except BaseException:
            stop([self])
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stop([self])

    def connected(self) -> int:
        """Return to how many servers it is connected."""
        try:
            page = json.loads(self.ask("GET", "/?t=json"))
        except OSError:
            return 0
        statuses = [server["connection_status"] for server in page["servers"]]
        # "connected" over HTTPS, "Connected to (where)" over Foolscap.
        return sum(status.casefold().startswith("connected") for status in statuses)

    def put(self, data: bytes) -> str:
        """Store a file; returns its cap. May be called in any thread."""
        return self.ask("PUT", "/uri", data).decode("ascii").strip()

    def get(self, cap: str, into: Callable[[memoryview], object]) -> None:
        """Fetch a file, piece by piece. May be called in any thread."""
        self.ask("GET", f"/uri/{urllib.parse.quote(cap)}", into=into)

    def ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        into: Callable[[memoryview], object] | None = None,
    ) -> bytes:
        """
        Make one request; returns the answer, unless it goes ``into`` something. May be called in any thread.

        Raises:
            GatewayFailed: the answer says so.
        """
        headers: Mapping[str, str] = {"Content-Type": "application/octet-stream"}
        with contextlib.closing(HTTPConnection(LOOPBACK, self._port, REQUEST_S)) as connection:
            connection.request(method, path, data, headers if data is not None else {})
            answer = connection.getresponse()
            if answer.status >= 300:
                said = answer.read(2000).decode("utf-8", "replace")
                raise GatewayFailed(f"it answered {answer.status} to {method}: {said}")
            if into is None:
                return answer.read()
            buffer = memoryview(bytearray(1 << 18))
            while size := answer.readinto(buffer):
                into(buffer[:size])
            return b""
