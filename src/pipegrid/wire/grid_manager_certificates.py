"""
Certificates of grid managers, signed with Ed25519, which say which servers may get shares.

Source: Tahoe-LAFS 1.20, ``docs/managed-grid.rst`` and the behaviour of its ``grid_manager`` module.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

from pipegrid.core import base32
from pipegrid.core.text import counted
from pipegrid.errors import UsageError

CERTIFICATES = "grid-manager-certificates"
"""The key of an announcement's field that has the certificates."""

MAX_CERTIFICATES = 16
"""The maximum number of a server's certificates that are verified: those that are valid longest."""
MAX_READ_CERTIFICATES = 128
"""Maximum number of certificates read from a server; servers that keep expired ones announce many."""
MAX_CERTIFICATE_CHARACTERS = 512
"""The maximum length of a certificate; usual certificates have 130 characters."""
MAX_FILE_BYTES = 4096
"""The maximum size of a file that has one certificate."""
NEAR_EXPIRY_S = 7 * 86400.0
"""How long before its expiry a certificate is reported as expiring."""
_SIGNATURE_CHARACTERS = 103
_KEY = re.compile(r"pub-(v0-[a-z2-7]{52})\Z")
_DAY_S = 86400
_UNITS = ((_DAY_S, "day"), (3600, "hour"), (60, "minute"))


class ManagerKey(NamedTuple):
    """
    The public key of a grid manager.

    Attributes:
        name: the user's name for the manager.
        public_bytes: 32 bytes.
    """

    name: str
    public_bytes: bytes

    def __str__(self) -> str:
        return f"pub-v0-{base32.encode(self.public_bytes)}"

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Return whether the manager has signed these bytes."""
        return is_signed(self.public_bytes, message, signature)


def is_signed(public_bytes: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether the owner of an Ed25519 key has signed these bytes."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public_bytes).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def parse_manager_key(name: str, text: str) -> ManagerKey:
    """
    Return the key that a text such as ``pub-v0-...`` encodes.

    Raises:
        UsageError: the text is not a key.
    """
    public_bytes = public_key_bytes(text)
    if public_bytes is None:
        raise UsageError(
            f"the key of grid manager {name!r} is not pub-v0- and 52 characters of base32; copy it again"
        )
    return ManagerKey(name, public_bytes)


def public_key_bytes(text: str) -> bytes | None:
    """Return the 32 bytes of a public key such as ``pub-v0-...``; None if the text is not a public key."""
    match = _KEY.match(text)
    try:
        public_bytes = base32.decode(match[1].removeprefix("v0-")) if match else b""
    except ValueError:
        return None
    return public_bytes if len(public_bytes) == 32 else None


class SignedCertificate(NamedTuple):
    """
    A certificate as announced, not verified.

    Attributes:
        certificate: {"expires": "2027-01-31T12:00:00+00:00", "public_key": "pub-v0-...", "version": 1}
        signature: base32 of the signature of the certificate's text.
    """

    certificate: str
    signature: str


class CertificateTerms(NamedTuple):
    """
    The content of a certificate; its signature is checked separately.

    Attributes:
        public_key: the server's public key, as in the server's ``node.pubkey``.
        expires: a date with a time zone.
    """

    public_key: str
    expires: datetime

    @property
    def expires_s(self) -> float:
        """The time when the certificate expires, in seconds since 1970."""
        return self.expires.timestamp()

    @property
    def minute(self) -> str:
        """The time when the certificate expires, for people."""
        return minute_of(self.expires)


def minute_of(expires: datetime) -> str:
    """Return a time for people, to the minute."""
    return f"{expires:%Y-%m-%d %H:%M %Z}"


def terms_of(signed: SignedCertificate) -> CertificateTerms | None:
    """Return the content of a certificate; None if the certificate is malformed."""
    try:
        fields = json.loads(signed.certificate)
        expires, public_key = datetime.fromisoformat(fields["expires"]), fields["public_key"]
        # A time without a zone cannot be compared with the current time.
        if expires.tzinfo is None or not isinstance(public_key, str):
            return None
        expires.timestamp()
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return CertificateTerms(public_key, expires)


def parse_certificate(data: bytes) -> SignedCertificate:
    """
    Return the certificate in a file that a grid manager has made.

    Raises:
        ValueError: the file has no certificate, or clients of Tahoe-LAFS could not read it; the text is to
            follow "it is not a certificate: ".
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(fields, dict) or set(fields) != {"certificate", "signature"}:
        raise ValueError("it does not consist of 'certificate' and 'signature'")
    found = read_certificates([fields])
    if not found or terms_of(found[0]) is None or signature_of(found[0]) is None:
        raise ValueError("a field of it is damaged")
    return found[0]


def signature_of(signed: SignedCertificate) -> bytes | None:
    """Return the 64 bytes of a certificate's signature; None if the signature is not base32."""
    try:
        return base32.decode(signed.signature)
    except ValueError:
        return None


def in_words(seconds: float) -> str:
    """Return a duration for people, in whole days, hours or minutes, such as ``29 days`` or ``47 hours``."""
    for unit_s, name in _UNITS:
        if seconds >= 2 * unit_s:
            return counted(int(seconds / unit_s), name)
    return counted(max(0, int(seconds / 60)), "minute")


class Certified(NamedTuple):
    """
    A certificate of a server, signed by a configured manager.

    Attributes:
        manager: the user's name for the manager.
        expires_s: the time when the certificate expires, in seconds since 1970.
        expires: the time when the certificate expires, for people.
    """

    manager: str
    expires_s: float
    expires: str
    signed: SignedCertificate


def read_certificates(announced: object) -> tuple[SignedCertificate, ...]:
    """
    Return the certificates in a field of an untrusted announcement, without malformed and too long ones.
    """
    found = []
    for each in announced[:MAX_READ_CERTIFICATES] if isinstance(announced, list) else ():
        match each:
            case {"certificate": str(text), "signature": str(signature)}:
                is_short = len(text) <= MAX_CERTIFICATE_CHARACTERS
                if is_short and len(signature) == _SIGNATURE_CHARACTERS:
                    found.append(SignedCertificate(text, signature))
    return tuple(found)


def certified_by(
    server_id: str, certificates: Sequence[SignedCertificate], managers: Sequence[ManagerKey]
) -> Certified | None:
    """
    Return the server's certificate that is valid longest and signed by one of the managers, even if it has
    expired; None if there is none.

    Malformed certificates are ignored; they are not an error. Only the ``MAX_CERTIFICATES`` that are valid
    longest are verified.

    Args:
        server_id: ``v0-`` and the server's key; a server with another kind of id has no certificate.
        managers: the managers that the client trusts.
    """
    named = [
        (terms, signed)
        for signed in (certificates if managers else ())
        if (terms := terms_of(signed)) is not None and terms.public_key == f"pub-{server_id}"
    ]
    named.sort(key=lambda each: each[0].expires_s, reverse=True)
    for terms, signed in named[:MAX_CERTIFICATES]:
        if (manager := _signer(signed, managers)) is not None:
            return Certified(manager.name, terms.expires_s, terms.expires.isoformat(), signed)
    return None


def _signer(signed: SignedCertificate, managers: Sequence[ManagerKey]) -> ManagerKey | None:
    signature = signature_of(signed)
    try:
        message = signed.certificate.encode("utf-8")
    except UnicodeEncodeError:  # JSON may contain half a surrogate pair
        return None
    for manager in managers:
        if signature is not None and manager.has_signed(message, signature):
            return manager
    return None


class Certification:
    """
    Whether a server may get shares, depending on its certificate. Reading from servers without a certificate
    is allowed.

    Args:
        certified: the server's certificate; None if it has none from a configured manager.
        now: returns the time, in seconds since 1970.
    """

    __slots__ = ("certified", "now")

    def __init__(self, certified: Certified | None, now: Callable[[], float] = time.time) -> None:
        self.certified = certified
        self.now = now

    def __call__(self) -> str | None:
        """Return why the server may not get shares now; None if it may get shares."""
        if self.certified is None:
            return "it has no certificate of a configured grid manager"
        if self.certified.expires_s <= self.now():
            return (
                f"its certificate of grid manager {self.certified.manager} has expired "
                f"({self.certified.expires})"
            )
        return None
