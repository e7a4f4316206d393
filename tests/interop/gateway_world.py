"""
Grids on loopback for Tahoe-LAFS's own gateway: ten storage servers of either kind, over either protocol.

A node's directory stays when its server is stopped, so that a server of the other kind can be started on it.
Ports are taken from below the range of which the kernel takes those of outgoing connections: a gateway that
reconnects all the time would else get one of a server that is just being replaced.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from pipegrid.core import base32
from pipegrid.storage import identity
from pipegrid.wire import furl
from tests.interop.processes import PATIENCE_S, TAHOE, Gateway, Process, until

Kind = Literal["tahoe", "pipegrid"]
Protocol = Literal["gbs", "foolscap"]
SHARES = (3, 7, 10)  # needed, happy, total
NURL = re.compile(r"^pb://\S+#v=1$", re.M)

_PORTS = range(12_000, 32_000)
_taken: set[int] = set()


def reserve_port() -> int:
    """Return a port that nobody listens on, and that is not returned again."""
    for _ in range(1000):
        port = random.choice(_PORTS)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _taken:
            _taken.add(port)
            return port
    raise AssertionError("no port is free")


def tahoe(*arguments: str, data: bytes = b"", statuses: Sequence[int] = (0,)) -> str:
    """Run a Tahoe-LAFS command; returns what it prints."""
    done = subprocess.run(
        [TAHOE, *arguments],
        input=data,
        capture_output=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    if done.returncode not in statuses:
        text = done.stdout.decode() + done.stderr.decode()
        raise AssertionError(f"tahoe {arguments}: status {done.returncode}: {text}")
    return done.stdout.decode()


class Templates:
    """Nodes' directories as Tahoe-LAFS makes them, made once and copied, since its command takes a second."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def server(self, directory: Path, settings: str = "") -> None:
        """Make a storage node's directory. ``settings`` are lines for its ``[storage]``."""
        template = self._root / "server-template"
        if not template.exists():
            tahoe(
                *("create-node", "--listen=tcp", "--port=tcp:1:interface=127.0.0.1"),
                *("--location=tcp:127.0.0.1:1", "--webport=none", "-n", "NICKNAME", str(template)),
            )
        shutil.copytree(template, directory)
        port = reserve_port()
        path = directory / "tahoe.cfg"
        text = path.read_text()
        for old, new in (
            ("NICKNAME", directory.name),
            ("tcp:1:interface", f"tcp:{port}:interface"),
            ("127.0.0.1:1\n", f"127.0.0.1:{port}\n"),
            ("reserved_space = 1G\n", f"reserved_space = 1M\n{settings}"),
        ):
            assert old in text, (old, text)
            text = text.replace(old, new)
        path.write_text(text)

    def gateway(self, directory: Path) -> None:
        """Make a client's directory, with a port of its own."""
        template = self._root / "gateway-template"
        needed, happy, total = SHARES
        if not template.exists():
            tahoe(
                *("create-client", "--webport=tcp:1:interface=127.0.0.1"),
                *(f"--shares-needed={needed}", f"--shares-happy={happy}"),
                *(f"--shares-total={total}", str(template)),
            )
        shutil.copytree(template, directory)
        path = directory / "tahoe.cfg"
        path.write_text(path.read_text().replace("tcp:1:", f"tcp:{reserve_port()}:"))


@attrs.define
class Server:
    """
    A storage server on a node's directory.

    Attributes:
        directory: its name is the server's.
        kind: whose software serves it now.
    """

    directory: Path
    kind: Kind
    _process: Process | None = None
    _starts: int = 0

    @property
    def name(self) -> str:
        """What people call it."""
        return self.directory.name

    def start(self, kind: Kind) -> None:
        """Start to serve the directory; ``wait`` waits until it does."""
        assert self._process is None
        self.kind = kind
        self._starts += 1
        command = (
            (TAHOE, "run", "--allow-stdin-close", str(self.directory))
            if kind == "tahoe"
            else (sys.executable, "-m", "pipegrid.cli", "-d", str(self.directory), "serve")
        )
        log = self.directory.with_name(f"{self.name}.{self._starts}")
        self._process = Process(log, *command)

    def wait(self) -> None:
        """Wait until it listens."""
        process = self._process
        assert process is not None

        def listens() -> bool:
            if self.kind == "pipegrid":
                return NURL.search(process.log()) is not None
            path = self.directory / "private/storage.furl"
            if not path.exists():
                return False
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        try:
            until(listens, f"{self.kind} serving {self.name}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {process.log()[-2000:]}") from None

    def stop(self) -> None:
        """End it, and wait until it is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    @property
    def log(self) -> str:
        """What the process said."""
        assert self._process is not None
        return self._process.log()

    @property
    def port(self) -> int:
        """Where it listens."""
        match = re.search(
            r"^tub.port = tcp:(\d+)", (self.directory / "tahoe.cfg").read_text(), re.M
        )
        assert match is not None
        return int(match[1])

    @property
    def furl(self) -> str:
        """Its Foolscap address, as its directory has it."""
        return (self.directory / "private/storage.furl").read_text().strip()

    @property
    def nurl(self) -> str:
        """Its HTTPS address: that follows from the key, the secret and the port."""
        address = furl.parse(self.furl)
        pem = (self.directory / "private/node.pem").read_bytes()
        who = identity.from_pem(pem, address.swissnum, "node.pem")
        return str(who.nurl("127.0.0.1", self.port))

    def shares(self, storage_index: str) -> dict[int, Path]:
        """Return the files of the shares that it has of a file."""
        directory = self.directory / "storage/shares" / storage_index[:2] / storage_index
        return {int(path.name): path for path in directory.glob("*")}


def start_servers(root: Path, kinds: Sequence[Kind]) -> list[Server]:
    """
    Start storage servers that were never there before.

    Their directories are all Tahoe-LAFS nodes', so that the port, and what else there is to say, is in
    ``tahoe.cfg`` whoever serves them.
    """
    templates = Templates(root)
    servers = []
    for number, kind in enumerate(kinds):
        directory = root / f"server{number}"
        templates.server(directory)
        servers.append(Server(directory, kind))
    for server in servers:
        server.start(server.kind)
    for server in servers:
        server.wait()
    return servers


def start_gateway(root: Path, name: str, servers: Sequence[Server], protocol: Protocol) -> Gateway:
    """Start Tahoe-LAFS's gateway for these servers; returns it when it is connected to all."""
    directory = root / name
    Templates(root).gateway(directory)
    storage: dict[str, Any] = {}
    for server in servers:
        ann: dict[str, Any] = {"nickname": server.name, "anonymous-storage-FURL": server.furl}
        if protocol == "gbs":
            ann["anonymous-storage-NURLs"] = [server.nurl]
        server_id = f"v0-{base32.encode(server.name.encode().ljust(32))}"
        storage[server_id] = {"ann": ann}
    (directory / "private/servers.yaml").write_text(json.dumps({"storage": storage}))
    gateway = Gateway(directory, TAHOE, "run", "--allow-stdin-close", str(directory))
    try:
        until((directory / "node.url").exists, "the gateway's start")
        until_connected(gateway, servers)
    except AssertionError as error:
        gateway.stop()
        raise AssertionError(f"{error}: {gateway.log()[-2000:]}") from None
    return gateway


def until_connected(gateway: Gateway, servers: Sequence[Server]) -> None:
    """Wait until the gateway says that it is connected to all of them."""

    def all_are() -> bool:
        try:
            page = json.loads(gateway.request("GET", "?t=json"))
        except OSError:
            return False
        statuses = {each["nickname"]: each["connection_status"] for each in page["servers"]}
        # "Connected to ..." over Foolscap, "connected" over HTTPS.
        return all(statuses[each.name].lower().startswith("connected") for each in servers)

    until(all_are, "the gateway's connection to all servers")


def share_files(servers: Sequence[Server], storage_index: str) -> dict[int, Path]:
    """Return one file of each share of a file, wherever it is."""
    found: dict[int, Path] = {}
    for server in servers:
        found |= server.shares(storage_index)
    return found


def flip_byte(path: Path, offset: int) -> None:
    """Damage a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        assert byte, f"{path} ends before {offset}"
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
