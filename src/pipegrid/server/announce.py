"""
Announces a storage server to introducers, again after each lost connection, and stores its announced
identity.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from pipegrid.core import base32
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.file_system_calls import FULL
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import RemoteCallError, UsageError
from pipegrid.server.identity import unusable
from pipegrid.version import __version__
from pipegrid.wire import announcements, gbs_bundles
from pipegrid.wire.announcements import BUNDLES, FURL, NURLS, SEED, SERVICE, AnnouncementKey, Signed
from pipegrid.wire.introducer_protocol import (
    AnnouncementNotAccepted,
    Connect,
    Reconnecting,
    call,
    connect_introducer,
    reason_of,
    until_lost,
)
from pipegrid.wire.server_address import Furl

ANSWER_S = 60.0
"""How long an introducer may take to accept an announcement before a warning is logged."""
_NONCE_BYTES = 32

log = Logger()


@attrs.frozen
class AnnouncedIdentity:
    """
    The announced identity of a server, without addresses.

    Its files are those of Tahoe-LAFS, so that either program can use a node's directory:

        private/node.privkey   the signing key; the server's id is its public half
        node.pubkey            the public half
        permutation-seed       the server's position on every file's ring
        announcement-seqnum    the number of the server's last announcement; each number is greater than the
            previous one

    Attributes:
        key: signs announcements.
        permutation_seed: position on every file's ring.
        seqnum: the number of the next announcement.
    """

    key: AnnouncementKey
    permutation_seed: bytes
    seqnum: int


def load_or_create(directory: Path, tub_id: bytes, has_shares: bool) -> AnnouncedIdentity:
    """
    Return the identity in a node's directory, with a new ``seqnum``; missing parts are created and stored.

    Args:
        tub_id: 20 bytes; the permutation seed of a directory that has shares but no stored seed.

    Raises:
        UsageError: a file has unexpected content, or the directory cannot be used.
    """
    try:
        key = _load_key(directory)
        path = directory / "permutation-seed"
        seed = tub_id if has_shares else key.public_bytes
        text = _read_or_write(path, base32.encode(seed))
        try:
            seed = base32.decode(text)
        except ValueError:
            raise UsageError(f"{path} does not hold base32; restore it") from None
        if not seed:  # emptied by a full disk or a crash
            raise UsageError(
                f"{path} is empty; restore it, or clients look for shares on other servers"
            )
        return AnnouncedIdentity(key, seed, _next_seqnum(directory / "announcement-seqnum"))
    except OSError as error:
        raise unusable(error, directory) from error


def renewed(identity: AnnouncedIdentity, directory: Path) -> AnnouncedIdentity:
    """
    Return the identity with a new ``seqnum``, for an announcement that replaces the previous one.

    Raises:
        UsageError: the number cannot be read or stored.
    """
    try:
        return attrs.evolve(identity, seqnum=_next_seqnum(directory / "announcement-seqnum"))
    except OSError as error:
        raise unusable(error, directory) from error


def _load_key(directory: Path) -> AnnouncementKey:
    path = directory / "private" / "node.privkey"
    try:
        key = announcements.parse_signing_key(
            _read_or_write(path, str(announcements.make_signing_key()))
        )
    except ValueError as error:
        raise UsageError(
            f"{path} does not hold a signing key ({error}); restore it, or remove it for a new identity"
        ) from None
    _read_or_write(directory / "node.pubkey", key.public_text, 0o644)
    return key


def _next_seqnum(path: Path) -> int:
    text = read_file(path).decode("ascii", "replace").strip() if path.exists() else "0"
    if not (text.isdigit() and text.isascii() and len(text) < 19):
        raise UsageError(f"{path} holds no number; write into it one that was never announced")
    seqnum = int(text) + 1
    _note_seqnum(path, seqnum)
    return seqnum


def _note_seqnum(path: Path, seqnum: int) -> None:
    """
    Store a sequence number durably: if the number were used twice, introducers would ignore the second
    announcement.

    On a full disk the old number is overwritten in place, which needs no space: otherwise the server would
    not start, and its shares would be unavailable.
    """
    data = f"{seqnum}\n".encode("ascii")
    try:
        replace_file(path, data, mode=0o644)
    except OSError as error:
        if error.errno not in FULL or not path.exists():
            raise
        with path.open("r+b", buffering=0) as file:
            file.write(data.ljust(path.stat().st_size, b"\n"))
            os.fsync(file.fileno())


def _read_or_write(path: Path, text: str, mode: int = 0o600) -> str:
    if not path.exists():
        replace_file(path, f"{text}\n".encode("ascii"), mode=mode)
    return read_file(path).decode("ascii", "replace").strip()


def storage_fields(
    identity: AnnouncedIdentity,
    *,
    nickname: str,
    nurls: Sequence[str],
    furl: str | None,
    certificates: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """
    Return the fields of a storage server's announcement.

    Args:
        furl: the fURL, which Tahoe-LAFS's clients need even over HTTPS, since they derive secrets from its
            tub id; None: left out.
        certificates: certificates of grid managers; clients with grid managers store shares only on certified
            servers.
    """
    fields = {
        "version": 0,
        "nickname": nickname,
        "app-versions": [],
        "my-version": f"pipegrid/{__version__}",
        "oldest-supported": "1.0.0",
        "service-name": SERVICE,
        NURLS: list(nurls),
        BUNDLES: gbs_bundles.MAX_BUNDLE_BYTES,
        SEED: base32.encode(identity.permutation_seed),
        "seqnum": identity.seqnum,
        "nonce": base32.encode(os.urandom(_NONCE_BYTES)),
    }
    if furl is not None:
        fields[FURL] = furl
    if certificates:
        fields["grid-manager-certificates"] = list(certificates)
    return fields


@attrs.define(eq=False, repr=False)
class Announcer:
    """
    Publishes one announcement to any number of introducers.

    Args:
        connect: makes connections: a tub's ``getReference``.
        canary: returns one of this server's objects, which introducers may watch to notice a lost connection.
    """

    _introducers: Mapping[str, Furl]
    _signed: Signed
    _connect: Connect
    _clock: IReactorTime
    _canary: Callable[[], Any]
    _complained: set[str] = attrs.field(factory=set)
    _keeping: list[Reconnecting] = attrs.field(factory=list)
    _stopped: bool = False

    def start(self) -> None:
        """Announce the server until ``stop`` is called."""
        self._keeping = [self._keep(name, furl) for name, furl in self._introducers.items()]
        for each in self._keeping:
            each.start()

    def replace(self, signed: Signed) -> None:
        """Replace the announcement; connected introducers get the new one at once."""
        self._signed = signed
        if not self._stopped:
            self._cancel()
            self.start()

    def stop(self) -> None:
        """Stop announcing; introducers keep the last announcement."""
        self._stopped = True
        self._cancel()

    def _cancel(self) -> None:
        for each in self._keeping:
            each.stop()

    def _keep(self, name: str, furl: Furl) -> Reconnecting:
        def use() -> Deferred[None]:
            return Deferred.fromCoroutine(self._announce(name, furl))

        def lost(error: Exception | None) -> None:
            if name not in self._complained:  # warn once per outage, not per attempt
                self._complained.add(name)
                refused = isinstance(error, AnnouncementNotAccepted)
                log.warn(
                    "introducer {name} at {address} {what}: {reason}; it is tried again",
                    what="does not accept the announcement" if refused else "is unreachable",
                    name=name,
                    address=furl.address,
                    reason=reason_of(error),
                )

        return Reconnecting(self._clock, use, lost, lambda: random.uniform(0.7, 1.3))

    async def _announce(self, name: str, furl: Furl) -> None:
        reference = await connect_introducer(self._connect, furl, self._clock)
        lost = until_lost(reference)
        late = self._clock.callLater(ANSWER_S, self._not_taken, name, furl)
        try:
            await call(reference, "publish_v2", self._signed, self._canary())
        except RemoteCallError as error:
            raise AnnouncementNotAccepted(str(error)) from None
        finally:
            if late.active():
                late.cancel()
        self._complained.discard(name)
        log.info("announced to introducer {name} at {address}", name=name, address=furl.address)
        await lost

    def _not_taken(self, name: str, furl: Furl) -> None:
        if name not in self._complained:
            self._complained.add(name)
            log.warn(
                "introducer {name} at {address} has not acknowledged the announcement for {limit_s:g} s; "
                "clients may not find this server through it; if that lasts, restart this server",
                name=name,
                address=furl.address,
                limit_s=ANSWER_S,
            )
