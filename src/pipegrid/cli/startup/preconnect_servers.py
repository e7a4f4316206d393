"""
Connections to the servers of a client's directory, before anything else of the grid is imported.

Which those are is guessed from the text of ``servers.yaml``: reading it as what it is waits for modules that
take as long as the connections. A wrong guess costs a connection that nobody uses; what is right is decided
by ``servers``, as ever. Settings that forbid connections are never guessed: where the configuration is
refused (``tahoe_settings``), or the file may say how a server is to be reached, nothing is dialled.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.grid.client_paths import SERVERS_NAME, default_directory
from pipegrid.grid.tahoe_settings import CONNECTIONS, checked_config

if TYPE_CHECKING:
    from pipegrid.reactor.preconnect import HostPort, Preconnector

# Sockets and TLS are imported when there is somebody to connect to: an embedded grid needs neither.

_WAYS = (CONNECTIONS.encode(), b"\\")
"""What may say how a server is to be reached; an escape may stand for any character."""

_MOST_BYTES = 64 << 10
"""A longer file names more servers than are dialled."""


def addresses_in(text: bytes) -> list[HostPort]:
    """
    Return the addresses of the servers that speak HTTPS, as a ``servers.yaml`` seems to name them.

    None are returned if there are more than ``MOST``: which ones a file will be on is not known yet. Names
    and what stands in a comment are left out.
    """
    if any(each in text for each in _WAYS):
        return []
    nurl = rb"pb://[^\s\"'@/]+@(\[[0-9a-fA-F:]+\]|[0-9.]+):([0-9]{1,5})/[^\s\"'#]*#v=1"
    found: dict[HostPort, None] = {}
    for line in text.splitlines():
        if not line.lstrip().startswith(b"#"):
            for host, port in re.findall(nurl, line):
                if 0 < int(port) < 1 << 16:
                    found[host.strip(b"[]").decode("ascii"), int(port)] = None
    if not found:
        return []
    from pipegrid.reactor.preconnect import MOST

    return [] if len(found) > MOST else list(found)


def dial(directory: str | os.PathLike[str] | None) -> Preconnector | None:
    """
    Begin to connect to the servers that a client's directory names; None: there are none to begin with.

    Args:
        directory: None for the user's own.
    """
    try:
        place = default_directory() if directory is None else Path(directory)
        text = read_file(place / SERVERS_NAME, _MOST_BYTES + 1)
        addresses = addresses_in(text) if len(text) <= _MOST_BYTES else []
        if not addresses:
            return None
        checked_config(place, "client")
    except (OSError, UsageError):
        return None  # whoever opens the grid tells what is wrong
    from pipegrid.reactor.preconnect import Preconnector
    from pipegrid.reactor.tls_settings import http_context

    try:
        return Preconnector(addresses, http_context())
    except (OSError, RuntimeError):
        return None  # without files or threads to spare
