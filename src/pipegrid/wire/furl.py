"""
fURLs: where a Foolscap object is, how to know its owner, and the secret that opens it.

    pb://<tub id>@tcp:<host>:<port>,<another hint>/<swissnum>

The introducer has one; so has every storage server of Tahoe-LAFS, over HTTPS as well: secrets are derived
from its tub id.

Source: the format reference, storage protocols, sections 2.1 and 6.
"""

from __future__ import annotations

import re

import attrs

from pipegrid.core import base32
from pipegrid.errors import UsageError

_MAX_TEXT = 2048
# Readers use 32 characters of the tub id, whatever follows.
_FURL = re.compile(r"pb://([a-z2-7]{32})[a-z2-7]*@([^/\s]*)/([^/#?\s]+)\Z")
_TCP = re.compile(r"(tcp:)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}\Z")


@attrs.frozen
class Furl:
    """
    The address of one Foolscap object.

    Attributes:
        tub_id: 20 bytes, SHA-1 of the owner's certificate (DER).
        hints: where it may be, such as ``tcp:example.org:1234``; alternatives.
        swissnum: whoever knows it may use the object.
    """

    tub_id: bytes
    hints: tuple[str, ...]
    swissnum: str = attrs.field(repr=False)

    def __str__(self) -> str:
        return f"pb://{base32.encode(self.tub_id)}@{','.join(self.hints)}/{self.swissnum}"

    @property
    def address(self) -> str:
        """Where it is, for people, without the secret: it is a stranger's, and goes to terminals and logs."""
        hint = self.hints[0].removeprefix("tcp:") if self.hints else "nowhere"
        return "".join(char if char.isprintable() else "?" for char in hint)

    @property
    def tcp_hints(self) -> tuple[str, ...]:
        """Those of the hints that are addresses which plain TCP can reach; of old they had no prefix."""
        return tuple(
            hint
            for hint in self.hints
            if _TCP.match(hint) and not is_overlay_name(hint.rpartition(":")[0])
        )

    @property
    def leads_to_tcp(self) -> bool:
        """Whether one of the hints is such an address."""
        return bool(self.tcp_hints)


def is_overlay_name(host: str) -> bool:
    """Return whether only Tor or I2P resolve a name: to ask for it would tell where one goes (RFC 7686)."""
    return host.lower().rstrip(".").endswith((".onion", ".i2p"))


def is_furl(text: str) -> bool:
    """Return whether a text is a fURL (a NURL is none)."""
    return len(text) <= _MAX_TEXT and _FURL.match(text) is not None


def parse(text: str) -> Furl:
    """
    Return what a fURL says.

    Raises:
        UsageError: it is none. The text does not repeat the secret.
    """
    if "#v=" in text:
        raise UsageError("that is a storage server's NURL (its end is #v=1), and no fURL")
    match = _FURL.match(text) if len(text) <= _MAX_TEXT else None
    if match is None:
        raise UsageError("a fURL looks like pb://TUBID@tcp:HOST:PORT/SWISSNUM; copy all of it")
    try:
        tub_id = base32.decode(match[1])
    except ValueError:
        raise UsageError("the fURL's tub id is not base32; copy it again") from None
    hints = tuple(hint for hint in match[2].split(",") if hint)
    return Furl(tub_id, hints, match[3])
