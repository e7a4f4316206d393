"""
Certificates of grid managers: who may store shares of a grid's clients, signed with Ed25519.

A grid manager certifies servers; a server announces its certificates, under ``grid-manager-certificates``:

    certificate  text: {"expires": "2027-01-31T12:00:00+00:00", "public_key": "pub-v0-...", "version": 1}
    signature    base32 of the signature over the certificate's text as it stands

A client that trusts managers uploads to servers that have a certificate of one of them which has not expired,
and is made out to the key that is the server's id. Others are read from all the same.

What others send is wrong or right here, never an error: a wrong certificate certifies nothing.

Source: Tahoe-LAFS 1.20, ``docs/managed-grid.rst`` and the behaviour of its ``grid_manager`` module.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime

import attrs

from pipegrid.core import base32
from pipegrid.errors import UsageError

CERTIFICATES = "grid-manager-certificates"
"""What announcements call them."""

MAX_CERTIFICATES = 16
"""Of one server; those after these are not looked at."""
MAX_CERTIFICATE_CHARACTERS = 512
"""Real ones have 130."""
_SIGNATURE_CHARACTERS = 103
_KEY = re.compile(r"pub-(v0-[a-z2-7]{52})\Z")


@attrs.frozen
class ManagerKey:
    """
    The public key of a grid manager.

    Attributes:
        name: what the user calls the manager.
        public_bytes: 32 bytes.
    """

    name: str
    public_bytes: bytes

    def __str__(self) -> str:
        return f"pub-v0-{base32.encode(self.public_bytes)}"

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Return whether the manager has signed these bytes."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.public_bytes).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


def parse_manager_key(name: str, text: str) -> ManagerKey:
    """
    Return the key that a text such as ``pub-v0-...`` spells.

    Raises:
        UsageError: it spells none.
    """
    match = _KEY.match(text)
    try:
        public_bytes = base32.decode(match[1].removeprefix("v0-")) if match else b""
    except ValueError:
        public_bytes = b""
    if len(public_bytes) != 32:
        raise UsageError(
            f"the key of grid manager {name!r} is not pub-v0- and 52 characters of base32; copy it again"
        )
    return ManagerKey(name, public_bytes)


@attrs.frozen
class SignedCertificate:
    """A certificate as it was announced, whatever it is worth: its text, and the signature in base32."""

    certificate: str
    signature: str = attrs.field(repr=False)


@attrs.frozen
class Certified:
    """
    A certificate of a server, signed by a manager that counts.

    Attributes:
        manager: what the user calls it.
        expires_s: seconds since 1970 from which on it is worth nothing.
        expires: the same, for people.
    """

    manager: str
    expires_s: float
    expires: str
    signed: SignedCertificate = attrs.field(repr=False)


def read_certificates(announced: object) -> tuple[SignedCertificate, ...]:
    """Return the certificates of an announcement, whatever somebody sent; what is none is left out."""
    found = []
    for each in announced[:MAX_CERTIFICATES] if isinstance(announced, list) else ():
        text, signature = (
            (each.get("certificate"), each.get("signature"))
            if isinstance(each, dict)
            else (None, None)
        )
        if isinstance(text, str) and isinstance(signature, str):
            is_short = len(text) <= MAX_CERTIFICATE_CHARACTERS
            if is_short and len(signature) == _SIGNATURE_CHARACTERS:
                found.append(SignedCertificate(text, signature))
    return tuple(found)


def certified_by(
    server_id: str, certificates: Sequence[SignedCertificate], managers: Sequence[ManagerKey]
) -> Certified | None:
    """
    Return the certificate of a server that is valid longest, expired or not; None if it has none.

    Args:
        server_id: ``v0-`` and its key; whatever else it may be is certified by nobody.
        managers: whose certificates count.
    """
    found = [_certified(server_id, each, managers) for each in certificates if managers]
    return max(
        (each for each in found if each is not None), key=lambda each: each.expires_s, default=None
    )


def _certified(
    server_id: str, signed: SignedCertificate, managers: Sequence[ManagerKey]
) -> Certified | None:
    try:
        fields = json.loads(signed.certificate)
        expires = datetime.fromisoformat(fields["expires"])
        # A time of no zone is neither before nor after now.
        if fields["public_key"] != f"pub-{server_id}" or expires.tzinfo is None:
            return None
        expires_s = expires.timestamp()
        signature = base32.decode(signed.signature)
        message = signed.certificate.encode("utf-8")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    for manager in managers:
        if manager.has_signed(message, signature):
            return Certified(manager.name, expires_s, expires.isoformat(), signed)
    return None


@attrs.frozen
class Certification:
    """
    Whether a server may be given shares, by what certifies it.

    Args:
        certified: by which certificate; None: there is none that counts.
        now: what time it is, in seconds since 1970.
    """

    certified: Certified | None
    now: Callable[[], float] = time.time

    def __call__(self) -> str | None:
        """Return why it is given none, at this moment; None: it may be."""
        if self.certified is None:
            return "it has no certificate of a configured grid manager"
        if self.certified.expires_s <= self.now():
            return (
                f"its certificate of grid manager {self.certified.manager} has expired "
                f"({self.certified.expires})"
            )
        return None
