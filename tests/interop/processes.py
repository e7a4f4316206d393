"""
Tahoe-LAFS and PipeGrid as processes of their own, on loopback ports and scratch directories.

Tahoe-LAFS lives in an environment of its own; ``$TAHOE`` says where its command is. Its code is never
imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from misc.command import environment
from misc.speedtest.peers.nodes import free_port

from pipegrid.core import base32
from pipegrid.grid.client_paths import INTRODUCERS_NAME, SERVERS_NAME

TAHOE = os.environ.get("TAHOE", str(Path(__file__).parents[2] / ".venv-tahoe/bin/tahoe"))
PATIENCE_S = 90.0
STOP_S = 10.0


def until(ready: Callable[[], Any], what: str, *processes: Process) -> Any:
    """Wait until a function returns something true; the processes that it needs must live."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        found = ready()
        if found:
            return found
        for process in processes:
            process.assert_running()
        time.sleep(0.05)
    said = "".join(f"\n{process.directory.name}: {process.log()[-2000:]}" for process in processes)
    raise AssertionError(f"{what} did not happen within {PATIENCE_S} s{said}")


def run_pipegrid(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a PipeGrid command, which may fail."""
    return subprocess.run(
        [sys.executable, "-m", "pipegrid.cli", *arguments],
        input=data,
        env=environment(),
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )


def pipegrid(*arguments: str, data: bytes = b"", status: int = 0) -> bytes:
    """Run a PipeGrid command; returns what it prints."""
    done = run_pipegrid(*arguments, data=data)
    if done.returncode != status:
        raise AssertionError(f"{arguments}: status {done.returncode}: {done.stderr.decode()}")
    return done.stdout


class Process:
    """A process that lasts as long as a test wants it."""

    def __init__(self, directory: Path, *command: str) -> None:
        self.directory = directory
        self._log = open(directory.with_suffix(".log"), "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=self.surroundings(),
        )

    def surroundings(self) -> dict[str, str]:
        """Return its environment: with this very package, installed or not."""
        return environment()

    def assert_running(self) -> None:
        """Fail if it has ended by itself."""
        if self._process.poll() is not None:
            name, status = self.directory.name, self._process.returncode
            raise AssertionError(f"{name} ended with status {status}: {self.log()[-2000:]}")

    def tell_to_stop(self) -> None:
        """Let it begin to end, if it runs."""
        self._process.terminate()

    def stop(self) -> None:
        """End it."""
        self.tell_to_stop()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._log.close()

    def log(self) -> str:
        """Return what it said."""
        return self.directory.with_suffix(".log").read_text("utf-8", "replace")


class Node(Process):
    """
    A node of Tahoe-LAFS, in a directory that ``make_node`` made.

    It ends when its standard input does, so it never outlives the tests.
    """

    def __init__(self, directory: Path) -> None:
        if not Path(TAHOE).exists():
            raise AssertionError(
                f"{TAHOE} is missing; `make` installs it, or $TAHOE says where the command is"
            )
        super().__init__(directory, TAHOE, "run", str(directory))

    def surroundings(self) -> dict[str, str]:
        """Return its environment, in which there is nothing of ours."""
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def make_node(directory: Path, settings: str, kind: str = "client") -> None:
    """
    Make a directory that ``tahoe run`` takes, as its documentation describes one.

    Args:
        settings: of ``tahoe.cfg``.
        kind: ``client``, which storage servers are as well, or ``introducer``.
    """
    (directory / "private").mkdir(parents=True, exist_ok=True)
    (directory / "tahoe.cfg").write_text(settings)
    (directory / f"tahoe-{kind}.tac").touch()  # tells what kind of node it is


def listening(directory: Path, port: int) -> str:
    """Return settings of a node that others connect to."""
    return (
        f"[node]\nnickname = {directory.name}\nweb.port =\n"
        f"tub.port = tcp:{port}:interface=127.0.0.1\ntub.location = tcp:127.0.0.1:{port}\n"
    )


def text_of(path: Path, node: Process) -> str:
    """Return a file's text once its node has written it."""
    written: str = until(
        lambda: path.exists() and path.read_text().strip(), f"{path} being written", node
    )
    return written


def launch_introducer(directory: Path) -> Node:
    """Start an introducer; ``introducer_furl`` waits for its fURL."""
    make_node(directory, listening(directory, free_port()), "introducer")
    return Node(directory)


def introducer_furl(introducer: Node) -> str:
    """Return an introducer's fURL, as soon as it has one."""
    return text_of(introducer.directory / "private/introducer.furl", introducer)


def launch_tahoe_server(directory: Path, introducer: str | None = None) -> Node:
    """
    Start a storage node, which speaks both protocols; nothing is waited for.

    Args:
        introducer: fURL of the one that it announces itself to.
    """
    settings = listening(directory, free_port())
    make_node(directory, settings + "[client]\n[storage]\nenabled = true\nreserved_space = 0\n")
    if introducer is not None:
        write_introducers(directory, introducer)
    return Node(directory)


def server_furl(server: Node) -> str:
    """Return a storage node's fURL, as soon as it has one."""
    return text_of(server.directory / "private/storage.furl", server)


def start_tahoe_server(directory: Path) -> tuple[Node, str]:
    """Start a storage node; returns it and its fURL."""
    node = launch_tahoe_server(directory)
    return node, server_furl(node)


def storage_directory(server: Process) -> Path:
    """Return where a server of either kind keeps its shares."""
    return server.directory / "storage/shares"


def start_pipegrid_server(directory: Path) -> tuple[Process, str]:
    """Start ``pipegrid serve``; returns it and its fURL."""
    node = Process(
        directory,
        *(sys.executable, "-m", "pipegrid.cli", "-d", str(directory)),
        *("serve", "--port", f"tcp:{free_port()}:interface=127.0.0.1"),
    )
    found = until(lambda: re.search(r"^pb://\S+@tcp:\S+$", node.log(), re.M), "the fURL")
    return node, found[0]


def start_gateway(
    directory: Path,
    furls: Mapping[str, str],
    shares: tuple[int, int, int],
    *,
    introducer: str | None = None,
    servers: int | None = None,
    force_foolscap: bool = False,
    convergence: bytes | None = None,
) -> Gateway:
    """
    Start a Tahoe-LAFS gateway; waits until it is connected to all servers.

    Args:
        furls: of servers, by nickname; they are spoken to over Foolscap.
        shares: needed, happy, total.
        introducer: fURL of the one that names more servers.
        servers: how many servers there are in all; by default those of ``furls``.
        force_foolscap: speak Foolscap with servers that speak HTTPS as well.
        convergence: the convergence secret; by default it makes one.
    """
    needed, happy, total = shares
    settings = (
        f"[node]\nweb.port = tcp:{free_port()}:interface=127.0.0.1\n"
        "tub.port = disabled\ntub.location = disabled\n"
        f"[client]\nshares.needed = {needed}\nshares.happy = {happy}\nshares.total = {total}\n"
        f"force_foolscap = {force_foolscap}\n[storage]\nenabled = false\n"
    )
    make_node(directory, settings)
    if furls:
        write_servers(directory, furls)
    if introducer is not None:
        write_introducers(directory, introducer)
    if convergence is not None:
        (directory / "private/convergence").write_text(base32.encode(convergence) + "\n")
    gateway = Gateway(directory)
    expected = len(furls) if servers is None else servers
    try:
        gateway.wait(expected)
    except BaseException:
        gateway.stop()
        raise
    return gateway


def write_servers(directory: Path, furls: Mapping[str, str]) -> None:
    """Write a ``servers.yaml`` that names each server by its fURL alone."""
    storage = {
        f"v0-{base32.encode(name.encode().ljust(32))}": {
            "ann": {"nickname": name, "anonymous-storage-FURL": furl}
        }
        for name, furl in furls.items()
    }
    path = directory / SERVERS_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"storage": storage}))


def write_introducers(directory: Path, furl: str) -> None:
    """Write an ``introducers.yaml`` that names one."""
    path = directory / INTRODUCERS_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"introducers": {"default": {"furl": furl}}}))


class Gateway(Node):
    """
    A Tahoe-LAFS client's web gateway.

    Attributes:
        time_limit_s: how long it may take to answer.
    """

    time_limit_s = PATIENCE_S

    def wait(self, servers: int) -> None:
        """Return when it is connected to so many servers."""
        text_of(self.directory / "node.url", self)  # which is there before anything is in it
        until(lambda: self.connected() == servers, f"the gateway's {servers} connections", self)

    def request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Ask it something."""
        root = (self.directory / "node.url").read_text().strip()
        request = urllib.request.Request(root + path, data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.time_limit_s) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")[-2000:]
            raise AssertionError(f"{method} {path[:80]}: {error}: {said}") from None

    def connected(self) -> int:
        """Return to how many servers it is connected."""
        try:
            page = json.loads(self.request("GET", "?t=json"))
        except OSError:
            return 0
        statuses = [server["connection_status"] for server in page["servers"]]
        # "connected" over HTTPS, and "Connected to (where)" over Foolscap.
        return sum(status.casefold().startswith("connected") for status in statuses)

    def put(self, data: bytes, query: str = "") -> str:
        """Store a file; returns its cap."""
        return self.request("PUT", f"uri{query}", data).decode().strip()

    def get(self, cap: str) -> bytes:
        """Return a file."""
        return self.request("GET", f"uri/{cap}")

    def check(self, cap: str) -> dict[str, Any]:
        """Check and verify a file."""
        query = f"uri/{cap}?t=check&verify=true&output=JSON"
        found: dict[str, Any] = json.loads(self.request("POST", query, b""))
        return found


class PipegridGateway(Gateway):
    """``pipegrid gateway`` in a directory that a Tahoe-LAFS client could have."""

    def __init__(self, directory: Path) -> None:
        Process.__init__(
            self, directory, sys.executable, "-m", "pipegrid.cli", "-d", str(directory), "gateway"
        )

    def surroundings(self) -> dict[str, str]:
        """Return its environment: with this very package, installed or not."""
        return Process.surroundings(self)


def start_pipegrid_gateway(
    directory: Path, furls: dict[str, str], shares: tuple[int, int, int]
) -> PipegridGateway:
    """Start one that is configured as a client of Tahoe-LAFS; waits until it has all servers."""
    needed, happy, total = shares
    settings = (
        f"[node]\nweb.port = tcp:{free_port()}:interface=127.0.0.1\n"
        f"[client]\nshares.needed = {needed}\nshares.happy = {happy}\nshares.total = {total}\n"
    )
    make_node(directory, settings)
    for name, secret in (("convergence", b"c" * 16), ("secret", b"s" * 32)):
        (directory / "private" / name).write_text(base32.encode(secret) + "\n")
    write_servers(directory, furls)
    gateway = PipegridGateway(directory)
    try:
        gateway.wait(len(furls))
    except BaseException:
        gateway.stop()
        raise
    return gateway


class TahoeGrid:
    """
    An introducer and storage nodes that announce themselves to it; the nodes start side by side.

    Args:
        root: where their directories are made.

    Attributes:
        introducer: the introducer's process; ``introducer_furl`` tells where it is.
        servers: the storage nodes.
    """

    def __init__(self, root: Path, count: int) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.servers: list[Node] = []
        self.introducer = launch_introducer(root / "introducer")
        try:
            self.introducer_furl = introducer_furl(self.introducer)
            for number in range(count):
                directory = root / f"tahoe{number}"
                self.servers.append(launch_tahoe_server(directory, self.introducer_furl))
        except BaseException:
            self.stop()
            raise

    def furls(self) -> dict[str, str]:
        """Return the servers' fURLs by nickname."""
        return {server.directory.name: server_furl(server) for server in self.servers}

    def start_gateway(
        self,
        directory: Path,
        shares: tuple[int, int, int],
        *,
        force_foolscap: bool = False,
        convergence: bytes | None = None,
    ) -> Gateway:
        """Start a gateway that finds the servers through the introducer; see ``start_gateway``."""
        return start_gateway(
            directory,
            {},
            shares,
            introducer=self.introducer_furl,
            servers=len(self.servers),
            force_foolscap=force_foolscap,
            convergence=convergence,
        )

    def stop(self) -> None:
        """End all of it."""
        nodes = [self.introducer, *self.servers]
        for node in nodes:
            node.tell_to_stop()
        for node in nodes:
            node.stop()
