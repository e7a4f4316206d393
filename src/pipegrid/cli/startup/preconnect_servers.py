"""
Opens connections to the servers of a client's directory, before any other module of the grid is imported.

The addresses are guessed from the text of ``servers.yaml``, since parsing this file needs modules whose
import takes as long as connecting. A wrong guess costs an unused connection, since the grid parses the file
later and uses only connections to the right servers. No connection is opened if the configuration is refused
(``grid.tahoe_settings_check``), if it requires a proxy, or if ``servers.yaml`` may have settings for
connections.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.grid.client_paths import SERVERS_NAME, TAHOE_CONFIG_NAME, default_directory
from pipegrid.grid.tahoe_settings_check import CONNECTIONS, checked_config
from pipegrid.grid.tor_socks_settings import connection_policy

if TYPE_CHECKING:
    from pipegrid.reactor.preconnect import HostPort, Preconnector

# Sockets and TLS are imported only if an address is found: a grid on this machine needs neither.

_SETTING_MARKS = (CONNECTIONS.encode(), b"\\")
"""A file that contains one of these may have settings for connections, perhaps spelled with escapes."""

_MOST_BYTES = 64 << 10
"""The largest file that is read; a larger one has more servers than ``preconnect.MOST``."""


def addresses_in(text: bytes) -> list[HostPort]:
    """
    Return the addresses of the HTTPS servers that a ``servers.yaml`` seems to have.

    None are returned if the file may have settings for connections, or if there are more than ``MOST``
    addresses, since it is unknown which of the servers has a file. Addresses with host names, and those in
    comments, are left out.
    """
    if any(each in text for each in _SETTING_MARKS):
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
    Connect to the servers of a client's directory; return None if no connection is opened.

    Args:
        directory: the client's directory; None: the user's own.
    """
    try:
        place = default_directory() if directory is None else Path(directory)
        text = read_file(place / SERVERS_NAME, _MOST_BYTES + 1)
        addresses = addresses_in(text) if len(text) <= _MOST_BYTES else []
        if not addresses:
            return None
        path, parser = checked_config(place, "client")
        if not connection_policy(parser, path.name == TAHOE_CONFIG_NAME).is_direct:
            return None
    except (OSError, UsageError):
        return None  # opening the grid reports the error
    from pipegrid.reactor.preconnect import Preconnector
    from pipegrid.reactor.tls_settings import http_context

    try:
        return Preconnector(addresses, http_context())
    except (OSError, RuntimeError):
        return None  # out of file descriptors or threads
