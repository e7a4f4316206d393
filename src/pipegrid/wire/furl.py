"""
fURLs: where a server is that speaks Foolscap, how to know it, and the secret that opens it.

    pb://<tub id>@<hint>,<hint>.../<swissnum>          a hint: tcp:<host>:<port>, tor:..., or <host>:<port>

Source: the format reference, storage protocols, section 2.1.
"""

from __future__ import annotations

import re

import attrs

from pipegrid.core import base32
from pipegrid.errors import UsageError
from pipegrid.wire import nurl

_MAX_TEXT = 4096
# Readers of fURLs use 32 characters of the tub id, whatever follows.
_FURL = re.compile(
    r"pb://(?P<tub_id>[a-z2-7]{32})[a-z2-7]*@(?P<hints>[^/#?\s]*)/(?P<swissnum>[^/#?\s]+)\Z"
)
_TCP = re.compile(
    r"(?:tcp:)?(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})\Z"
)


@attrs.frozen
class Furl:
    """
    The address of one server's Foolscap.

    Attributes:
        tub_id: 20 bytes, SHA-1 of the certificate (DER).
        hints: how to reach it, each in its own way.
        swissnum: whoever knows it may use the server.
    """

    tub_id: bytes
    hints: tuple[str, ...]
    swissnum: str = attrs.field(repr=False)

    def __str__(self) -> str:
        return f"pb://{base32.encode(self.tub_id)}@{','.join(self.hints)}/{self.swissnum}"

    @property
    def tcp_hints(self) -> tuple[str, ...]:
        """Those that lead over TCP, in full."""
        found = (_TCP.match(hint) for hint in self.hints)
        return tuple(tcp_hint(m["host"] or m["ipv6"], int(m["port"])) for m in found if m)


def tcp_hint(host: str, port: int) -> str:
    """Return the hint for a TCP port; IPv6 is put into brackets."""
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def parse(text: str) -> Furl:
    """
    Return what a fURL says.

    Raises:
        UsageError: it is none. The text does not repeat the secret.
    """
    match = _FURL.match(text.strip()) if len(text) <= _MAX_TEXT else None
    if match is None or not nurl.is_swissnum(match["swissnum"]):
        nurl_like = text.rstrip().endswith("#v=1")
        what = "this is a NURL, for HTTPS; a fURL" if nurl_like else "a storage server's fURL"
        raise UsageError(
            f"{what} looks like pb://TUBID@tcp:HOST:PORT/SWISSNUM, with 32 characters of tub id; "
            "copy all of it from the server's output"
        )
    hints = tuple(hint for hint in match["hints"].split(",") if hint)
    return Furl(base32.decode(match["tub_id"]), hints, match["swissnum"])
