"""
A storage server tells introducers where it is, and tells them again whenever a connection was lost.

What makes it the same server to everybody lies where Tahoe-LAFS keeps it, so that a node's directory can
change hands unnoticed:

    private/node.privkey   the key that signs, and whose public half is the server's id
    node.pubkey            that half
    permutation-seed       its place on every file's ring
    announcement-seqnum    the number of its last announcement; the next one has a greater one

Source: the format reference, storage protocols, sections 4.2 and 5.1.
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
from pipegrid.disk.files import FULL
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.server.identity import unusable
from pipegrid.version import __version__
from pipegrid.wire import announcements, gbs_bundles
from pipegrid.wire.announcements import BUNDLES, FURL, NURLS, SEED, SERVICE, AnnouncementKey, Signed
from pipegrid.wire.introducer_protocol import (
    Connect,
    Reconnecting,
    call,
    connect_introducer,
    reason_of,
    until_lost,
)
from pipegrid.wire.server_address import Furl

ANSWER_S = 60.0
"""How long an introducer may take to say that it has an announcement, before somebody is told."""
_NONCE_BYTES = 32

log = Logger()


@attrs.frozen
class AnnouncedIdentity:
    """
    What announcements say, apart from addresses.

    Attributes:
        key: signs them.
        permutation_seed: place on every file's ring.
        seqnum: of the next announcement.
    """

    key: AnnouncementKey
    permutation_seed: bytes
    seqnum: int


def load_or_create(directory: Path, tub_id: bytes, has_shares: bool) -> AnnouncedIdentity:
    """
    Return what a node's directory holds, with a new ``seqnum``; what is missing is made, for good.

    Args:
        tub_id: 20 bytes; where there are shares already, but no seed, it is the server's place.

    Raises:
        UsageError: a file holds something else, or the directory cannot be used.
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
        if not seed:  # a disk that was full, or a crash
            raise UsageError(
                f"{path} is empty; restore it, or clients look for shares on other servers"
            )
        return AnnouncedIdentity(key, seed, _next_seqnum(directory / "announcement-seqnum"))
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
    Write the number down, durably: used twice it would be no news.

    On a full disk it goes over the one before, which takes no room: the shares of a server that does not
    start are out of reach.
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
    Return what a storage server's announcement says.

    Args:
        furl: Tahoe-LAFS's clients need it even where they speak HTTPS: secrets derive from its tub id.
        certificates: of grid managers, without which their clients put nothing there.
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


class Announcer:
    """
    Publishes one announcement with any number of introducers.

    Args:
        connect: makes connections: a tub's ``getReference``.
        canary: an object of ours that introducers may watch, to know that we are gone.
    """

    def __init__(
        self,
        introducers: Mapping[str, Furl],
        signed: Signed,
        connect: Connect,
        clock: IReactorTime,
        canary: Callable[[], Any],
    ) -> None:
        self._signed = signed
        self._connect = connect
        self._clock = clock
        self._canary = canary
        self._complained: set[str] = set()
        self._keeping = [self._keep(name, furl) for name, furl in introducers.items()]

    def start(self) -> None:
        """Begin to announce, until stopped."""
        for each in self._keeping:
            each.start()

    def stop(self) -> None:
        """Announce no more; what was announced stays known."""
        for each in self._keeping:
            each.stop()

    def _keep(self, name: str, furl: Furl) -> Reconnecting:
        def use() -> Deferred[None]:
            return Deferred.fromCoroutine(self._announce(name, furl))

        def lost(error: Exception | None) -> None:
            if name not in self._complained:  # once an outage, however often it is tried
                self._complained.add(name)
                log.warn(
                    "introducer {name} at {address} is unreachable: {reason}; it is tried again",
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
                "clients may not learn of this server from it until the server is restarted",
                name=name,
                address=furl.address,
                limit_s=ANSWER_S,
            )
