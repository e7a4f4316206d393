"""
One real ``pipegrid serve`` process whose storage directory is where the caller wants it.

A client of it stores every file as one share, 1-of-1: then it is the server's disk that is measured (or
cut off), rather than the client's coding.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import Popen

from misc.speedtest import processes
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME


@contextlib.contextmanager
def one_server(
    directory: Path, storage: Path, durability: str, prefix: Sequence[str] = ()
) -> Iterator[tuple[Path, Popen[str]]]:
    """
    Run a server as long as the context lasts.

    Args:
        directory: for the node's and the client's own files. Who comes back with the same one is the
            same client (secrets and all) of the same server, on another port.
        storage: the storage directory.
        prefix: of the server's command line; a program that becomes the one that it is given.

    Returns:
        the client's directory, and the server's process.
    """
    arguments = [
        *("-q", "-d", str(directory / "node"), "serve", "--storage", str(storage)),
        *("--port", f"tcp:0:interface={processes.LOOPBACK}", "--durability", durability),
    ]
    program = ["-m", "pipegrid.speedtest.end_with_parent", "pipegrid.cli"]
    command = [*prefix, sys.executable, *program, *arguments]
    with processes.running(command) as process:
        address = processes.first_line(process)
        client = directory / "client"
        servers = client / SERVERS_NAME
        known = servers.exists()
        servers.parent.mkdir(parents=True, exist_ok=True)
        announcement = {"ann": {"anonymous-storage-NURLs": [address]}}
        servers.write_text(json.dumps({"storage": {"v0-server": announcement}}), "utf-8")
        if not known:
            create_client(client, params=Params(1, 1), happy=1)
        yield client, process
