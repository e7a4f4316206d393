"""
Addresses of servers: NURLs of GBS and fURLs of Foolscap.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

import attrs

from pipegrid.core import base32
from pipegrid.errors import UsageError
from pipegrid.reactor.connection_policy import ConnectionPolicy, RefusedWay, is_overlay_name

#     pb://<tub id>@tcp:<host>:<port>,<another hint>/<swissnum>
#
# Introducers and all Tahoe-LAFS storage servers have a fURL, even if they are used over HTTPS: secrets are
# derived from the tub id.

_MAX_TEXT = 2048
# Programs read 32 characters of the tub id, and ignore further characters.
_FURL = re.compile(r"pb://([a-z2-7]{32})[a-z2-7]*@([^/\s]*)/([^/#?\s]+)\Z")
_HINT = re.compile(
    r"(?:(?P<how>tcp|tor):)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})\Z"
)


class HintPlace(NamedTuple):
    """
    The place to which a hint leads.

    Attributes:
        host: a name or an address; IPv6 without its brackets.
        through_tor: whether only Tor leads to the place, as the hint or the name says.
    """

    host: str
    port: int
    through_tor: bool


def place_of(hint: str) -> HintPlace | None:
    """Return the place to which a hint for TCP or Tor leads; None for a hint of another kind."""
    match = _HINT.match(hint)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        return None
    host = match["host"].removeprefix("[").removesuffix("]")
    return HintPlace(host, int(match["port"]), match["how"] == "tor" or is_overlay_name(host))


@attrs.frozen
class Furl:
    """
    The address of one Foolscap object.

    Attributes:
        tub_id: 20 bytes, SHA-1 of the owner's certificate (DER).
        hints: alternative addresses, such as ``tcp:example.org:1234``.
        swissnum: the secret that allows using the object.
    """

    tub_id: bytes
    hints: tuple[str, ...]
    swissnum: str = attrs.field(repr=False)

    def __str__(self) -> str:
        return f"pb://{base32.encode(self.tub_id)}@{','.join(self.hints)}/{self.swissnum}"

    @property
    def address(self) -> str:
        """
        The address for people, without the secret. It is made safe for terminals and logs, since it is
        untrusted.
        """
        hint = self.hints[0].removeprefix("tcp:").removeprefix("tor:") if self.hints else "nowhere"
        return "".join(char if char.isprintable() else "?" for char in hint)

    @property
    def has_address(self) -> bool:
        """Whether at least one hint is for TCP or Tor."""
        return any(place_of(hint) is not None for hint in self.hints)

    def reachable(self, policy: ConnectionPolicy) -> Furl:
        """
        Return the fURL with only the hints to use: hints for TCP; and hints through Tor if TCP is not direct,
        or if there are no others.

        Raises:
            ValueError: no hint can be used; the text says why.
        """
        places = [(hint, place) for hint in self.hints if (place := place_of(hint)) is not None]
        if not places:
            raise ValueError("its fURL has no address for TCP or Tor, and only those are supported")
        chosen = reachable([place for _, place in places], policy)
        hints = [hint for wanted in chosen for hint, place in places if place == wanted]
        return attrs.evolve(self, hints=tuple(dict.fromkeys(hints)))


def reachable(places: Sequence[HintPlace], policy: ConnectionPolicy) -> list[HintPlace]:
    """
    Return the places to connect to, with the best first.

    If direct connections are permitted, Tor is used only if nothing else leads to the server; otherwise onion
    services come first.

    Raises:
        ValueError: the policy permits none of the places; the text says why.
    """
    found = [each for each in places if policy.permits(each.host, each.through_tor)]
    if not found:
        reasons = [policy.way_to(each.host, each.through_tor) for each in places]
        why = [each.reason for each in reasons if isinstance(each, RefusedWay)]
        raise ValueError(f"no connection to it is permitted: {why[0] if why else 'no address'}")
    if policy.is_direct:
        return [each for each in found if not each.through_tor] or found
    return sorted(found, key=lambda each: not each.through_tor)


def is_furl(text: str) -> bool:
    """Return whether a text is a fURL, not a NURL."""
    return len(text) <= _MAX_TEXT and _FURL.match(text) is not None


def parse_furl(text: str) -> Furl:
    """
    Parse a fURL.

    Raises:
        UsageError: the text is not a fURL. The error does not repeat the secret.
    """
    if "#v=" in text:
        raise UsageError("that is a storage server's NURL (its end is #v=1), not a fURL")
    match = _FURL.match(text) if len(text) <= _MAX_TEXT else None
    if match is None:
        raise UsageError("a fURL looks like pb://TUBID@tcp:HOST:PORT/SWISSNUM; copy all of it")
    try:
        tub_id = base32.decode(match[1])
    except ValueError:
        raise UsageError("the fURL's tub id is not base32; copy it again") from None
    hints = tuple(hint for hint in match[2].split(",") if hint)
    return Furl(tub_id, hints, match[3])


#     pb://<spki>@<host>:<port>/<swissnum>#v=1
#     pb+tor://<spki>@<host>.onion:<port>/<swissnum>#v=1

SPKI_HASH_BYTES = 32

_SWISSNUM = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%-]+\Z")
_NURL = re.compile(
    r"pb(?P<tor>\+tor)?://(?P<spki>[A-Za-z0-9_-]{43})@"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})"
    r"/(?P<swissnum>[^/#?]+)#v=1\Z"
)
_OTHER_VERSION = re.compile(r"#v=(?!1\Z)[0-9]+\Z")


@attrs.frozen
class Nurl:
    """
    The address of a server's HTTPS protocol.

    Attributes:
        spki_hash: 32 bytes, SHA-256 of the certificate's SubjectPublicKeyInfo (DER).
        host: a name or an address; IPv6 without its brackets.
        port: 1 to 65535.
        swissnum: ASCII; the secret that allows using the server.
        tor: whether the NURL says that the server is reached through Tor.
    """

    spki_hash: bytes
    host: str
    port: int
    swissnum: str = attrs.field(repr=False)
    tor: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        spki = base64.urlsafe_b64encode(self.spki_hash).rstrip(b"=").decode("ascii")
        scheme = "pb+tor" if self.tor else "pb"
        return f"{scheme}://{spki}@{host}:{self.port}/{self.swissnum}#v=1"

    @property
    def place(self) -> HintPlace:
        """The place to which the NURL leads, as for hints of fURLs."""
        return HintPlace(self.host, self.port, self.leads_through_tor)

    @property
    def leads_through_tor(self) -> bool:
        """Whether the server cannot be reached by TCP without Tor, because of the NURL's scheme or host."""
        return self.tor or is_overlay_name(self.host)

    def recognises(self, spki_hash: bytes) -> bool:
        """Return whether a certificate with this SPKI hash is the server's."""
        return hmac.compare_digest(self.spki_hash, spki_hash)


def parse_nurl(text: str) -> Nurl:
    """
    Parse a NURL.

    Raises:
        UsageError: the text is not a NURL. The error does not repeat the secret.
    """
    match = _NURL.match(text) if len(text) <= _MAX_TEXT else None
    if match is None and is_furl(text):
        raise UsageError(
            "that is a fURL, which leads to Foolscap; the NURL of the same server has #v=1 at its end"
        )
    if match is None and _OTHER_VERSION.search(text):
        raise UsageError("the NURL is of a version that is not known here; the known one is #v=1")
    if match is None:
        raise UsageError(
            "a storage server's NURL looks like pb://SPKI@HOST:PORT/SWISSNUM#v=1, with 43 characters "
            "of SPKI hash; copy all of it from the server's output"
        )
    host = match["host"] or match["ipv6"]
    port = int(match["port"])
    if match["ipv6"] is not None:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise UsageError(
                f"the NURL's host [{host}] is not an IPv6 address; correct it"
            ) from None
    if not 1 <= port <= 65535:
        raise UsageError(f"the NURL's port is {port}; a port is 1 to 65535")
    if match["tor"] and not host.endswith(".onion"):
        raise UsageError(f"the NURL leads through Tor, but {host} is not a .onion name; correct it")
    if not is_swissnum(match["swissnum"]):
        raise UsageError("the NURL's swissnum has characters that a URL cannot hold; copy it again")
    return Nurl(_spki_hash(match["spki"]), host, port, match["swissnum"], match["tor"] is not None)


def is_swissnum(text: str) -> bool:
    """Return whether a text may be a swissnum: ASCII characters of a URL's path segment."""
    return _SWISSNUM.match(text) is not None


def _spki_hash(text: str) -> bytes:
    try:
        digest = base64.b64decode(text + "=", altchars=b"-_", validate=True)
    except binascii.Error:
        digest = b""
    # 43 characters hold two bits more than 32 bytes. These bits must be zero, so that equal hashes have equal
    # texts.
    if base64.urlsafe_b64encode(digest).rstrip(b"=") != text.encode("ascii"):
        raise UsageError("the NURL's SPKI hash is not base64url of 32 bytes; copy it again")
    return digest
