"""Where a server listens, and where clients are told to look: as texts of people, and as hints of fURLs."""

from __future__ import annotations

import re
import socket
from typing import Any

from pipegrid.errors import UsageError

_LOCATION = re.compile(
    r"(?:(?P<how>tcp|tor|i2p):)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})\Z"
)


def endpoint_text(text: str, interface: str = "") -> str:
    """Return an endpoint's description; a bare number is a TCP port."""
    if not (text.isascii() and text.isdigit()):
        return text
    return f"tcp:{text}:interface={interface}" if interface else f"tcp:{text}"


def where(location: str | None, host: Any) -> tuple[str, ...]:
    """
    Return where clients are told to look, as Foolscap's hints; one at least is ``tcp:`` or ``tor:``.

    Args:
        location: as in ``ServeSettings``.
        host: what the first port says of itself.

    Raises:
        UsageError: the location makes no sense.
    """
    if location is None:
        name = str(getattr(host, "host", ""))
        port = int(getattr(host, "port", 0))
        if not port:  # a socket in the file system, behind something that clients reach
            raise UsageError(
                "no client can find a server that listens on no TCP port; give HOST:PORT with --location"
            )
        if name in ("", "0.0.0.0", "::"):
            name = socket.gethostname()
        return (_hint(name, port),)
    hints = []
    for text in location.split(","):
        match = _LOCATION.match(text.strip())
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise UsageError(
                f"the location {text.strip()!r} is not of the form HOST:PORT; correct it"
            )
        host_name = match["host"].removeprefix("[").removesuffix("]")
        hints.append(_hint(host_name, int(match["port"]), match["how"] or "tcp"))
    if not any(hint.startswith(("tcp:", "tor:")) for hint in hints):
        raise UsageError(f"the location {location!r} leads to no TCP port; add one, as HOST:PORT")
    return tuple(hints)


def _hint(host: str, port: int, how: str = "tcp") -> str:
    return f"{how}:[{host}]:{port}" if ":" in host else f"{how}:{host}:{port}"
