"""
Tahoe-LAFS and PipeGrid as processes of their own, on loopback ports and scratch directories.

Tahoe-LAFS lives in an environment of its own; ``$TAHOE`` says where its command is. Its code is never
imported.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipegrid.core import base32
from pipegrid.grid.servers import SERVERS_NAME

TAHOE = os.environ.get("TAHOE", ".venv-tahoe/bin/tahoe")
PATIENCE_S = 60.0


def free_port() -> int:
    """Return a port that nobody uses just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def until(ready: Callable[[], Any], what: str) -> Any:
    """Wait until a function returns something true."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        found = ready()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {PATIENCE_S} s")


def pipegrid(*arguments: str, data: bytes = b"", status: int = 0) -> bytes:
    """Run a PipeGrid command; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pipegrid.cli", *arguments],
        input=data,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode != status:
        raise AssertionError(f"{arguments}: status {done.returncode}: {done.stderr.decode()}")
    return done.stdout


class Process:
    """A process that lasts as long as a test wants it."""

    def __init__(self, directory: Path, *command: str) -> None:
        self.directory = directory
        self._log = open(directory.with_suffix(".log"), "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def log(self) -> str:
        """Return what it said."""
        return self.directory.with_suffix(".log").read_text("utf-8", "replace")


def start_tahoe_server(directory: Path) -> tuple[Process, str]:
    """Start a storage node; returns it and its fURL."""
    port = free_port()
    subprocess.run(
        [
            *(TAHOE, "create-node", "--listen=tcp", f"--port=tcp:{port}:interface=127.0.0.1"),
            *(f"--location=tcp:127.0.0.1:{port}", "--webport=none", "-n", directory.name),
            str(directory),
        ],
        check=True,
        capture_output=True,
    )
    node = Process(directory, TAHOE, "run", "--allow-stdin-close", str(directory))
    path = directory / "private/storage.furl"
    until(path.exists, f"{path} being written")
    return node, path.read_text().strip()


def start_pipegrid_server(directory: Path) -> tuple[Process, str]:
    """Start ``pipegrid serve``; returns it and its fURL."""
    node = Process(
        directory,
        *(sys.executable, "-m", "pipegrid.cli", "-d", str(directory)),
        *("serve", "--port", f"tcp:{free_port()}:interface=127.0.0.1"),
    )
    found = until(lambda: re.search(r"^pb://\S+@tcp:\S+$", node.log(), re.M), "the fURL")
    return node, found[0]


def start_gateway(directory: Path, furls: dict[str, str], shares: tuple[int, int, int]) -> Gateway:
    """Start a Tahoe-LAFS gateway that knows these servers; waits until it is connected to all."""
    needed, happy, total = shares
    subprocess.run(
        [
            *(TAHOE, "create-client", f"--webport=tcp:{free_port()}:interface=127.0.0.1"),
            *(f"--shares-needed={needed}", f"--shares-happy={happy}", f"--shares-total={total}"),
            str(directory),
        ],
        check=True,
        capture_output=True,
    )
    write_servers(directory, furls)
    gateway = Gateway(directory, TAHOE, "run", "--allow-stdin-close", str(directory))
    until((directory / "node.url").exists, "the gateway's start")
    until(lambda: gateway.connected() == len(furls), "the gateway's connection to all servers")
    return gateway


def write_servers(directory: Path, furls: dict[str, str]) -> None:
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


class Gateway(Process):
    """A Tahoe-LAFS client's web gateway."""

    def request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Ask it something."""
        root = (self.directory / "node.url").read_text().strip()
        request = urllib.request.Request(root + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            body: bytes = answer.read()
            return body

    def connected(self) -> int:
        """Return to how many servers it is connected."""
        try:
            page = json.loads(self.request("GET", "?t=json"))
        except OSError:
            return 0
        return sum(
            server["connection_status"].startswith("Connected") for server in page["servers"]
        )

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
