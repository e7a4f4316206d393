"""
Announcements of storage servers through introducers: signing, verification, and the newest announcement of
each server.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from pipegrid.core import base32
from pipegrid.core.hashes import tagged_hash
from pipegrid.core.placement import permutation_seed
from pipegrid.errors import UsageError
from pipegrid.wire import server_address
from pipegrid.wire.grid_manager_certificates import (
    CERTIFICATES,
    ManagerKey,
    SignedCertificate,
    certified_by,
    is_signed,
    read_certificates,
)
from pipegrid.wire.server_address import Furl, Nurl
from pipegrid.wire.storage_messages import ServerIdentity

SERVICE = "storage"
FURL = "anonymous-storage-FURL"
NURLS = "anonymous-storage-NURLs"
SEED = "permutation-seed-base32"
BUNDLES = "pipegrid-bundles"
"""
The field of an announcement that has the length in bytes of the longest bundle that the server accepts. With
it, even the first shares can be sent in a bundle.
"""

MAX_MESSAGE_BYTES = 32 << 10
"""Maximum size of a signed announcement. Most have about 1 KB, or a few KB with several certificates."""
MAX_SERVERS = 4096
MAX_ID_CHARACTERS = 256
MAX_KEPT_BYTES = 3584
"""Maximum size of an announcement's kept fields as JSON: ``MAX_SERVERS`` of them fit into 16 MiB."""
_MAX_NICKNAME_CHARACTERS = 100
_MAX_ADDRESSES = 16

_TOO_LONG_A_BUNDLE = 1 << 31

_KEPT = (FURL, NURLS, SEED, BUNDLES, "nickname", "seqnum", "service-name")
_NO_VALUE = True
"""Replaces a value of the wrong type. It has the wrong type, too, so reading the field reports the error."""

_VERSION = "v0-"
_SEED_BYTES = 32
_KEY_CHARACTERS = 52
_SIGNATURE_CHARACTERS = 103

Signed = tuple[bytes, bytes, bytes]
"""A signed announcement: message, signature, key."""


class AnnouncementKey(NamedTuple):
    """The private Ed25519 key of a server, as in ``private/node.privkey``."""

    seed: bytes

    def __repr__(self) -> str:
        """Return only the class name, since logs may contain it."""
        return "AnnouncementKey(...)"

    def __str__(self) -> str:
        return f"priv-{_VERSION}{base32.encode(self.seed)}"

    @property
    def server_id(self) -> str:
        """The id of the server that signs with this key."""
        return _VERSION + base32.encode(self.public_bytes)

    @property
    def public_text(self) -> str:
        """The public key, as in ``node.pubkey``."""
        return f"pub-{self.server_id}"

    @property
    def public_bytes(self) -> bytes:
        """The public key, 32 bytes."""
        return bytes(self._key().public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """Return the signature, 64 bytes."""
        return bytes(self._key().sign(message))

    def _key(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self.seed)


def make_signing_key() -> AnnouncementKey:
    """Return a new key from 32 random bytes."""
    return AnnouncementKey(os.urandom(_SEED_BYTES))


def parse_signing_key(text: str) -> AnnouncementKey:
    """
    Parse a private key.

    Raises:
        ValueError: the text is not a private key.
    """
    prefix = f"priv-{_VERSION}"
    if not text.startswith(prefix):
        raise ValueError(f"a signing key begins with {prefix}")
    seed = base32.decode(text.removeprefix(prefix))
    if len(seed) != _SEED_BYTES:
        raise ValueError(f"a signing key has {_SEED_BYTES} bytes, not {len(seed)}")
    return AnnouncementKey(seed)


@attrs.frozen
class Announcement:
    """
    A server's announcement, or a server's entry in a configuration file.

    Attributes:
        server_id: ``v0-`` and the key if the announcement was signed; any text in a file.
        fields: the JSON object.
        missing_since_s: when the introducer first listed other servers without this one; None: it lists this
            server.
    """

    server_id: str
    fields: Mapping[str, Any]
    missing_since_s: float | None = attrs.field(default=None, eq=False)

    @property
    def seqnum(self) -> int | None:
        """The sequence number, which grows with each change; None if it is missing."""
        seqnum = self.fields.get("seqnum")
        return seqnum if isinstance(seqnum, int) and not isinstance(seqnum, bool) else None


def sign(fields: Mapping[str, Any], key: AnnouncementKey) -> Signed:
    """
    Return the signed announcement: message, signature and key.

    The signature is made over the message's bytes. Signature and key are texts: ``v0-`` and base32.
    """
    message = json.dumps(fields).encode("ascii")
    signature = _VERSION + base32.encode(key.sign(message))
    return message, signature.encode("ascii"), key.server_id.encode("ascii")


def verify(signed: object) -> Announcement:
    """
    Check the size, the form and the signature of an announcement, and return it.

    Any client can send announcements. ``describe`` checks the fields. So that later versions can add to
    announcements, unknown fields and services are ignored, and so are addresses of unknown versions if a
    known one is present.

    Raises:
        ValueError: the announcement is malformed, too large, or not signed by its key; the text is to follow
            "it is skipped: ".
    """
    if not (isinstance(signed, tuple) and len(signed) == 3):
        raise ValueError("it is not a triple of message, signature and key")
    message, signature, key = signed
    if not all(isinstance(each, bytes) for each in signed):
        raise ValueError("message, signature and key are not all bytes")
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"it has {len(message)} bytes, and {MAX_MESSAGE_BYTES} are allowed")
    signature_bytes = _binary(signature, _SIGNATURE_CHARACTERS, "signature")
    if not is_signed(_binary(key, _KEY_CHARACTERS, "key"), message, signature_bytes):
        raise ValueError("its signature does not match its key; it was changed")
    try:
        fields = json.loads(message.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("its message is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("its message is not a JSON object")
    return Announcement(key.decode("ascii"), fields)


def signer(signed: object) -> str:
    """Return the key that an unverified announcement names, for error messages."""
    key = signed[2] if isinstance(signed, tuple) and len(signed) == 3 else None
    return repr(key[:60].decode("latin-1")) if isinstance(key, bytes) else "without a key"


def _binary(text: bytes, characters: int, what: str) -> bytes:
    """Return the bytes that a text of ``v0-`` and base32 encodes."""
    prefix = _VERSION.encode("ascii")
    if not text.startswith(prefix):
        raise ValueError(f"its {what} is of a version that is not known here; the known one is v0")
    if len(text) != len(prefix) + characters:
        raise ValueError(f"its {what} does not have {characters} characters after v0-")
    try:
        return base32.decode(text.removeprefix(prefix).decode("ascii"))
    except ValueError:
        raise ValueError(f"its {what} is not base32") from None


def kept(announcement: Announcement, managers: Sequence[ManagerKey] = ()) -> Announcement:
    """
    Return the announcement with only the fields that are used: 32 KiB of JSON may take 700 KiB in memory.

    Args:
        managers: of all certificates by these grid managers, only the one that is valid longest is kept.

    Raises:
        ValueError: the remaining fields are still too large.
    """
    fields = {key: _kept(announcement.fields[key]) for key in _KEPT if key in announcement.fields}
    if isinstance(name := fields.get("nickname"), str):
        fields["nickname"] = name[:_MAX_NICKNAME_CHARACTERS]
    announced = read_certificates(announcement.fields.get(CERTIFICATES)) if managers else ()
    if (best := certified_by(announcement.server_id, announced, managers)) is not None:
        fields[CERTIFICATES] = [best.signed._asdict()]
    size = len(json.dumps(fields))
    if size > MAX_KEPT_BYTES:
        raise ValueError(f"its addresses take {size} bytes, and {MAX_KEPT_BYTES} are allowed")
    return Announcement(announcement.server_id, fields)


def _kept(value: object) -> object:
    if isinstance(value, list):
        return [one if isinstance(one, str) else _NO_VALUE for one in value[:_MAX_ADDRESSES]]
    return value if value is None or isinstance(value, (str, int)) else _NO_VALUE


class AnnouncementRecords:
    """
    The newest announcement of every server, from any number of introducers, with only the fields that are
    used.

    An announcement equal to the known one changes nothing. If the known announcement has a ``seqnum``, only
    an announcement with a greater ``seqnum`` replaces it. Any new announcement replaces one that was
    remembered from an earlier run.

    Args:
        limit: how many servers are kept.
        managers: grid managers whose certificates are kept.
    """

    def __init__(self, limit: int = MAX_SERVERS, managers: Sequence[ManagerKey] = ()) -> None:
        self.limit = limit
        self._managers = managers
        self._known: dict[str, Announcement] = {}
        self._remembered: set[str] = set()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def announcements(self) -> list[Announcement]:
        """All known announcements, in the order of arrival."""
        return list(self._known.values())

    def remember(self, announcement: Announcement) -> bool:
        """
        Add an announcement of an earlier run if its server is not known, and it is not too large, and there
        are fewer than ``limit`` servers; returns whether it was added.
        """
        if announcement.server_id in self._known or len(self._known) >= self.limit:
            return False
        try:
            announcement = kept(announcement, self._managers)
        except ValueError:
            return False
        self._known[announcement.server_id] = announcement
        self._remembered.add(announcement.server_id)
        return True

    def hear(self, announcement: Announcement) -> bool:
        """
        Add an announcement from an introducer; returns whether it changes the records of storage servers.

        Raises:
            ValueError: there are too many servers already, or this announcement is too large.
        """
        if announcement.fields.get("service-name") != SERVICE:
            return False
        announcement = kept(announcement, self._managers)
        server_id = announcement.server_id
        known = self._known.get(server_id)
        if known is None and len(self._known) >= self.limit:
            raise ValueError(f"{self.limit} servers are known already, and no more are kept")
        only_remembered = server_id in self._remembered
        self._remembered.discard(server_id)
        if known is not None:
            if known.fields == announcement.fields:
                return False
            if not only_remembered and not _is_newer(announcement, known):
                return False
        self._known[server_id] = announcement
        return True


def _is_newer(announcement: Announcement, known: Announcement) -> bool:
    if known.seqnum is None:
        return True
    return announcement.seqnum is not None and announcement.seqnum > known.seqnum


class KnownServer(NamedTuple):
    """
    A server with at least one known address.

    Attributes:
        nurl: the HTTPS address, or None; the first one if there are several.
        furl: the Foolscap address, or None.
        bundle_bytes: the longest bundle that the server accepts; 0: none.
        other_nurls: further HTTPS addresses, perhaps with another key or another secret.
        certificates: certificates of grid managers, as announced and not verified.
    """

    identity: ServerIdentity
    nurl: Nurl | None
    furl: Furl | None = None
    bundle_bytes: int = 0
    certificates: tuple[SignedCertificate, ...] = ()
    other_nurls: tuple[Nurl, ...] = ()

    @property
    def addresses(self) -> tuple[Nurl | Furl, ...]:
        """All addresses; servers with a common address are the same server, even if their ids differ."""
        known = (self.nurl, self.furl, *self.other_nurls)
        return tuple([each for each in known if each is not None])


def describe(server_id: object, fields: Mapping[Any, Any]) -> KnownServer:
    """
    Return the server that an announcement, or an entry of a configuration file, describes.

    Raises:
        ValueError: the announcement or entry cannot be used; the text says why.
    """
    if not isinstance(server_id, str) or not 1 <= len(server_id) <= MAX_ID_CHARACTERS:
        raise ValueError(f"its id is not a text of 1 to {MAX_ID_CHARACTERS} characters")
    foolscap = _furl(fields)
    nurls = _nurls(fields, foolscap)
    address = nurls[0] if nurls else None
    if address is None and foolscap is None:
        raise ValueError(f"it has neither {NURLS} nor {FURL}, so its address is not known")
    if address is None and foolscap is not None and not foolscap.has_address:
        raise ValueError(f"its {FURL} has no address for TCP or Tor, and only those are supported")
    if foolscap is not None:
        lease_seed = foolscap.tub_id
    else:
        # Secrets are derived from the tub id, even if the server is used over HTTPS. A server without a tub
        # id gets a constant of 20 bytes that is derived from its key; any constant is enough for leases.
        assert address is not None
        lease_seed = tagged_hash(b"pipegrid_gbs_lease_seed_v1", address.spki_hash)[:20]
    try:
        seed = permutation_seed(server_id, _text(fields, SEED))
    except ValueError as error:
        raise ValueError(f"its {SEED} makes no sense: {error}") from None
    nickname = printable(_text(fields, "nickname") or "") or printable(server_id)
    identity = ServerIdentity(server_id, nickname, seed, lease_seed)
    bundles = fields.get(BUNDLES)
    if type(bundles) is not int or not 0 < bundles < _TOO_LONG_A_BUNDLE:
        bundles = 0
    certificates = read_certificates(fields.get(CERTIFICATES))
    return KnownServer(identity, address, foolscap, bundles, certificates, nurls[1:])


def printable(text: str) -> str:
    """Return an untrusted name in a form that can be shown in terminals and logs."""
    text = text[:_MAX_NICKNAME_CHARACTERS].strip()
    return "".join(char if char.isprintable() else "?" for char in text)


def _nurls(fields: Mapping[Any, Any], foolscap: Furl | None) -> tuple[Nurl, ...]:
    """
    Return the NURLs without duplicates, with those through Tor last. Return () if only the fURL can be used.
    """
    texts = fields.get(NURLS)
    if not texts:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"its {NURLS} are not a list of texts")
    found, wrong = [], []
    for text in texts[:_MAX_ADDRESSES]:
        try:
            found.append(server_address.parse_nurl(text))
        except UsageError as error:  # noqa: PERF203  perhaps of a later version: another may be known
            wrong.append(f"one of its {NURLS} cannot be used: {error}")
    if found:
        return tuple(dict.fromkeys(sorted(found, key=lambda each: each.leads_through_tor)))
    if foolscap is not None and not any(map(server_address.is_furl, texts)):
        return ()  # all NURLs are of a later version
    raise ValueError(wrong[0])


def _furl(fields: Mapping[Any, Any]) -> Furl | None:
    text = _text(fields, FURL)
    if text is None:
        return None
    try:
        return server_address.parse_furl(text)
    except UsageError as error:
        raise ValueError(f"its {FURL} cannot be used: {error}") from None


def _text(fields: Mapping[Any, Any], key: str) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"its {key} is not text")
    return value
