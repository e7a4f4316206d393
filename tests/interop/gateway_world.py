"""
Grids on loopback for Tahoe-LAFS's own gateway: an introducer, and storage servers of either kind.

Every server has a Tahoe-LAFS node's directory, whoever serves it, and is started with nothing but that: with
the commands of docs/how-to-replace-a-node.md, which says that this is enough. A directory stays when its
server is stopped, so that one of the other kind can be started on it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import attrs
import yaml
from misc.speedtest.peers.nodes import free_port

from pipegrid.server import identity
from pipegrid.wire import server_address
from tests.interop.processes import (
    PATIENCE_S,
    TAHOE,
    Gateway,
    Process,
    introducer_furl,
    launch_introducer,
    listening,
    make_node,
    start_gateway,
    until,
    write_introducers,
)

T = TypeVar("T")
Kind = Literal["tahoe", "pipegrid"]
Protocol = Literal["gbs", "foolscap"]
HOW_TO = Path(__file__).parents[2] / "docs/how-to-replace-a-node.md"
_ADDRESSES = re.compile(r"^(pb://\S+#v=1)\n(?:.*\n)*?(pb://\S+@tcp:\S+/\w+)\n", re.M)
"""A NURL and a fURL, each a whole line; the log of the process may have lines in between."""
_COMMAND = re.compile(r"^    ((?:tahoe|pipegrid) .*~/node.*)$", re.M)
_PROGRAMS: dict[str, tuple[str, ...]] = {
    "tahoe": (TAHOE,),
    "pipegrid": (sys.executable, "-m", "pipegrid.cli"),
}


def documented_command(kind: Kind, directory: Path) -> list[str]:
    """Return the command with which the page for operators starts a server of this kind."""
    starts = {
        "tahoe": ["tahoe", "run"],
        "pipegrid": ["pipegrid", "-d", "~/node", "serve"],
    }[kind]
    for text in _COMMAND.findall(HOW_TO.read_text("utf-8")):
        words = shlex.split(text)
        if words[: len(starts)] == starts:
            rest = [str(directory) if word == "~/node" else word for word in words[1:]]
            if kind == "tahoe":  # which else ends with the terminal's input
                rest.insert(1, "--allow-stdin-close")
            return [*_PROGRAMS[words[0]], *rest]
    raise AssertionError(f"{HOW_TO} says nowhere how to start {' '.join(starts)}")


def tahoe(*arguments: str) -> str:
    """Run a Tahoe-LAFS command; returns what it prints."""
    done = subprocess.run(
        [TAHOE, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    if done.returncode:
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
        raise AssertionError(f"tahoe {arguments}: status {done.returncode}: {text}")
    return done.stdout.decode()


@attrs.define
class Server:
    """
    A storage server on a Tahoe-LAFS node's directory.

    Attributes:
        directory: its name is the server's.
        port: where it listens.
        kind: whose software serves it, or served it last.
    """

    directory: Path
    port: int
    kind: Kind | None = None
    _process: Process | None = None
    _starts: int = 0
    _old_seqnum: int = 0

    @property
    def name(self) -> str:
        """What people call it."""
        return self.directory.name

    def start(self, kind: Kind) -> None:
        """Start to serve the directory; nothing is waited for."""
        assert self._process is None
        self.kind = kind
        self._starts += 1
        self._old_seqnum = self.seqnum
        log = self.directory.with_name(f"{self.name}-{self._starts}-{kind}")
        self._process = Process(log, *documented_command(kind, self.directory))

    def addresses(self) -> tuple[str, str]:
        """Return the NURL and fURL that ``pipegrid serve`` prints, once it does."""
        process = self._process
        assert process is not None
        # One line may be there before the other is.
        found = until(lambda: _ADDRESSES.search(process.log()), f"{self.name}'s addresses", process)
        return found[1], found[2]

    def refused_beside(self) -> None:
        """PipeGrid does not serve a directory in which a node of Tahoe-LAFS still runs."""
        done = subprocess.run(
            documented_command("pipegrid", self.directory),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "still running" in done.stderr, done.stderr

    def stop(self) -> None:
        """End it, and wait until it is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def pause(self) -> None:
        """Let a node of Tahoe-LAFS's stand still."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(int((self.directory / "running.process").read_text().split()[0]), number)

    def is_reached_by(self, gateway: Gateway) -> bool:
        """Return whether a gateway says that it is connected to it."""
        found = json.loads(gateway.request("GET", "?t=json"))["servers"]
        return any(
            each["nodeid"] == self.server_id
            and each["connection_status"].casefold().startswith("connected")
            for each in found
        )

    @property
    def furl(self) -> str:
        """Its Foolscap address, as its directory has it."""
        return (self.directory / "private/storage.furl").read_text().strip()

    @property
    def nurl(self) -> str:
        """Its HTTPS address: that follows from the key, the secret and the port."""
        pem = (self.directory / "private/node.pem").read_bytes()
        who = identity.from_pem(pem, server_address.parse_furl(self.furl).swissnum, "node.pem")
        return str(who.nurl("127.0.0.1", self.port))

    @property
    def server_id(self) -> str:
        """By which introducers know it, as its directory has it."""
        return (self.directory / "node.pubkey").read_text().strip().removeprefix("pub-")

    @property
    def seqnum(self) -> int:
        """The number of its last announcement, as its directory has it; 0 before the first."""
        path = self.directory / "announcement-seqnum"
        return int(path.read_text().strip() or 0) if path.exists() else 0

    def is_announced(self, heard: Mapping[str, int]) -> bool:
        """Return whether the newest announcement since its start is among the numbers that somebody heard."""
        return self._old_seqnum < self.seqnum <= heard.get(self.server_id, 0)

    def shares(self, storage_index: str) -> dict[int, Path]:
        """Return the files of the shares that it has of a file."""
        directory = self.directory / "storage/shares" / storage_index[:2] / storage_index
        return {int(path.name): path for path in directory.glob("*")}


class World:
    """
    An introducer, storage servers that announce themselves to it, and gateways that hear of them.

    Args:
        root: where everything is.
        shares: needed, happy, total.
    """

    def __init__(self, root: Path, kinds: Sequence[Kind], shares: tuple[int, int, int]) -> None:
        root.mkdir(parents=True)
        self.root = root
        self.servers: list[Server] = []
        self._shares = shares
        self._gateways: list[Gateway] = []
        self._introducer = launch_introducer(root / "introducer")
        try:
            self.introducer_furl = introducer_furl(self._introducer)
            for number, kind in enumerate(kinds):
                server = self.make_server(f"server{number}")
                server.start(kind)
        except BaseException:
            self.stop()
            raise

    def make_server(self, name: str) -> Server:
        """Make a directory as operators of Tahoe-LAFS storage nodes have them."""
        port = free_port()
        directory = self.root / name
        storage = "[client]\n[storage]\nenabled = true\nreserved_space = 1M\n"
        make_node(directory, listening(directory, port) + storage)
        write_introducers(directory, self.introducer_furl)
        server = Server(directory, port)
        self.servers.append(server)
        return server

    def start_gateway(
        self, protocol: Protocol, shares: tuple[int, int, int] | None = None
    ) -> Gateway:
        """
        Start Tahoe-LAFS's gateway; it is connected to all servers.

        Args:
            shares: needed, happy, total, if not as all of this world's.
        """
        name = "-".join(["gateway", protocol, *map(str, shares or ())])
        gateway = start_gateway(
            self.root / name,
            {},
            shares or self._shares,
            introducer=self.introducer_furl,
            servers=len(self.servers),
            force_foolscap=protocol == "foolscap",
        )
        self._gateways.append(gateway)
        return gateway

    def until_found(self, gateway: Gateway) -> None:
        """
        Wait until the gateway is connected to every server as it is now, whatever it was before.

        It connects anew when it hears the newest announcement, even if it is connected already; so it has to
        have heard that first.
        """
        until(lambda: self._has_heard(gateway), "the gateway's hearing of all servers", gateway)
        self.until_connected(gateway)

    def until_connected(self, gateway: Gateway) -> None:
        """Wait until the gateway is connected to every server, of the kind that it is now."""
        wanted = {server.server_id: server for server in self.servers}

        def all_are() -> bool:
            try:
                page = json.loads(gateway.request("GET", "?t=json"))
            except OSError:  # it is busy
                return False
            found = {each["nodeid"]: each for each in page["servers"]}
            return found.keys() == wanted.keys() and all(
                found[server_id]["connection_status"].casefold().startswith("connected")
                and (found[server_id]["version"] or "").startswith(f"{server.kind}")
                for server_id, server in wanted.items()
            )

        until(all_are, "the gateway's connection to all servers", gateway)

    def _has_heard(self, gateway: Gateway) -> bool:
        path = gateway.directory / "private/introducer_default_cache.yaml"
        try:
            heard = {
                each["key_s"]: each["ann"]["seqnum"] for each in yaml.safe_load(path.read_bytes())
            }
        except (OSError, TypeError, yaml.YAMLError):  # not yet, or being written
            return False
        return all(each.is_announced(heard) for each in self.servers)

    def stop(self) -> None:
        """End everything."""
        for gateway in self._gateways:
            gateway.stop()
        for server in self.servers:
            server.stop()
        self._introducer.stop()


def patiently(gateway: Gateway, call: Callable[[], T]) -> T:
    """
    Do something that needs all servers; once more while it fails.

    On a busy machine the gateway takes a server that did not answer for five seconds for lost, until it does.
    """
    failures: list[Exception] = []

    def attempt() -> list[T]:
        try:
            return [call()]
        except (AssertionError, OSError) as error:
            failures.append(error)
            return []

    try:
        found: list[T] = until(attempt, "an answer", gateway)
    except AssertionError as error:
        raise failures[-1] if failures else error from None
    return found[0]


def share_files(servers: Iterable[Server], storage_index: str) -> dict[int, Path]:
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
