"""
What a change of a mutable file is made from, and what is remembered of it, and of what was written.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from pipegrid.core.mutable.encoding import EncodedVersion
from pipegrid.core.mutable.versions import Version
from pipegrid.transfer.mutable.happiness import is_happy
from pipegrid.transfer.mutable.known import KnownFiles
from pipegrid.transfer.mutable.mapping import HEAD_BYTES, ShareMap
from pipegrid.transfer.mutable.publishing import Outcome
from pipegrid.transfer.mutable.slot import Slot
from pipegrid.transfer.peers import Peer


@attrs.define
class Base:
    """What the next version is made from, and where the shares are."""

    version: Version
    content: bytes | None
    heads: dict[Peer, dict[int, bytes]]
    highest: int
    is_warm: bool = False
    is_own: bool = False
    """It has the change already."""


def remember_read(
    files: KnownFiles, storage_index: bytes, found: ShareMap, version: Version
) -> None:
    """
    Remember a version that was read.

    One of which shares tell that it is there, but no content can be had, is none: the one before it counts,
    and would be taken for somebody's going back.
    """
    known = files.of(storage_index)
    if (version.sequence_number, version.root_hash) <= known.newest:
        return
    known.saw(version)
    if known.version != version:
        known.forget_version()
        copies: dict[str, list[int]] = {}
        for number, held in found.holders(version).items():
            for copy in held:
                copies.setdefault(copy.peer.identity.server_id, []).append(number)
        known.copies = {server: tuple(numbers) for server, numbers in copies.items()}
    files.save(storage_index, known)


def remember_base(files: KnownFiles, slot: Slot, base: Base) -> None:
    """Remember a version that was read to be changed, if it is the only one and all its shares are known."""
    known = files.of(slot.storage_index)
    head = base.version.signed_prefix[:HEAD_BYTES]
    heads = [(number, each) for shares in base.heads.values() for number, each in shares.items()]
    numbers = {number for number, each in heads if each[:HEAD_BYTES] == head}
    if len(numbers) < base.version.total_shares or any(e[:HEAD_BYTES] != head for _, e in heads):
        return
    if slot.wrong_enabler:  # their shares cannot be written: others have to be found each time
        return
    known.saw(base.version)
    known.begun_number = 0
    known.version = base.version
    known.content = base.content
    known.copies = {
        peer.identity.server_id: tuple(sorted(shares))
        for peer, shares in base.heads.items()
        if shares
    }
    if known.signing_key is not None:
        known.encrypted_key = known.signing_key.encrypted
    files.save(slot.storage_index, known)


def remember(
    files: KnownFiles,
    slot: Slot,
    encoded: EncodedVersion,
    content: bytes | None,
    outcome: Outcome,
    heads: Mapping[Peer, Mapping[int, bytes]],
) -> None:
    """Remember a version that was written; of one that reached too few servers, nothing."""
    known = files.of(slot.storage_index)
    version = encoded.version
    if not is_happy(slot, version, outcome):
        known.forget_version()
        return
    known.stored(version)
    copies: dict[str, list[int]] = {}
    for number, peers in outcome.placed.items():
        for peer in peers:
            copies.setdefault(peer.identity.server_id, []).append(number)
    stale = any(
        head[:HEAD_BYTES] != version.signed_prefix[:HEAD_BYTES]
        and peer not in outcome.placed.get(number, [])
        for peer, shares in heads.items()
        for number, head in shares.items()
    )
    known.version = version
    known.content = content
    known.copies = {server: tuple(sorted(numbers)) for server, numbers in copies.items()}
    if stale or len(outcome.placed) < version.total_shares:
        known.forget_version()
    if known.signing_key is not None:
        known.encrypted_key = known.signing_key.encrypted
    files.save(slot.storage_index, known)
