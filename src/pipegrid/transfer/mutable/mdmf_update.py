"""
Change a range of an MDMF file; only the segments that the range touches, and the hashes above them, are read
and written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from pipegrid.core.mutable.keys import SigningKey
from pipegrid.core.mutable.mutable_share import (
    MAX_HEADER_BYTES,
    Header,
    MutableShare,
    VerifiedVersions,
    new_sections,
)
from pipegrid.core.mutable.range_update import RangeUpdate
from pipegrid.core.mutable.versions import SALT_BYTES, Format, Version, next_sequence_number
from pipegrid.errors import (
    CorruptionError,
    NotEnoughSharesError,
    ServerError,
    UncoordinatedWriteError,
    UsageError,
)
from pipegrid.reactor.deferreds import all_ended
from pipegrid.transfer.mutable.modify import leader_of_range
from pipegrid.transfer.mutable.publish import (
    ExpectedHeads,
    Publish,
    WriteResult,
    write_result,
)
from pipegrid.transfer.mutable.servermap import Copy, ServerMap, ServermapUpdate
from pipegrid.transfer.mutable.slot_client import Slot, quorum
from pipegrid.transfer.mutable.version_cache import VersionCache, remember
from pipegrid.transfer.peers import Peer

TRIES = 5
"""Maximum number of attempts to change one range in place if each attempt has a conflict."""


def splice(old: bytes, offset: int, data: bytes) -> bytes:
    """
    Return the old content with ``data`` written over it from an offset on; ``data`` may reach past the end.

    Raises:
        UsageError: the offset is past the end.
    """
    if not 0 <= offset <= len(old):
        raise UsageError(
            f"cannot write at byte {offset} of a file of {len(old)} bytes: begin at its end at the latest"
        )
    return old[:offset] + data + old[offset + len(data) :]


class Update:
    """
    A change of a range in place.

    An update needs all n shares of one version, and works only while no other client writes. If there is a
    conflict before anything was changed, the update waits and tries again. In all other cases, and for SDMF,
    ``Modification`` writes the whole file with the range changed, unless the file is too long for this:
    writing it whole tolerates missing shares and other writers.

    Round trips: query, read, write. If the version is cached the query is left out: reads use the layout that
    this client's own writes produce, and a share with another layout fails the test of its header.

    Args:
        random: returns a number from 0 up to 1.

    Attributes:
        tried: the versions that were written; a version is added as soon as a server may have a part of it.
    """

    def __init__(
        self,
        slot: Slot,
        files: VersionCache,
        offset: int,
        data: bytes,
        usual: tuple[int, int],
        random: Callable[[], float],
    ) -> None:
        self._slot = slot
        self._files = files
        self._known = files.of(slot.storage_index)
        self._offset = offset
        self._data = data
        self._usual = usual
        self._random = random
        self._version: Version | None = None
        self._found = 0
        self._spare: list[Copy] = []  # further copies of the same shares; they are written, too
        self._left_some = False
        self.tried: list[Version] = []

    async def run(self) -> WriteResult | None:
        """
        Return the result; None if the range cannot be changed in place, so that the file must be written
        whole.

        Raises:
            UsageError: the range begins after the end of the file.
            UnhappyError: too few servers accepted their part.
            UncoordinatedWriteError, NotEnoughSharesError: the file is too long to be written whole, and other
                clients write, or some of its shares cannot be read.
        """
        settings, wait_s = self._slot.settings, 0.0
        for _ in range(TRIES):
            written = await self._try()
            if written is not None or self._left_some or not (self.tried or self._is_too_long()):
                break
            wait_s = min(max(2 * wait_s, settings.first_wait_s), settings.max_wait_s)
            await deferLater(self._slot.clock, wait_s * (0.5 + self._random()))
        if written is None:
            self._check_length()
        return written

    def _is_too_long(self) -> bool:
        """
        Return whether the file is too long to be written whole, so that this update must wait for other
        clients' writes.
        """
        version = self._version
        return version is not None and version.size > self._slot.settings.max_content_bytes

    def _check_length(self) -> None:
        version = self._version
        if version is None or not self._is_too_long():
            return
        total = version.total_shares
        text = (
            f"a range of this mutable file of {version.size} bytes, which is too long to be written whole, "
            f"can be changed only where all {total} shares of one version can be read, and no other client "
            "writes; try again later"
        )
        if self._found < total:
            raise NotEnoughSharesError(
                f"{text}, with more servers: there are {self._found} now", self._found, total
            )
        tried = self.tried[-1].sequence_number if self.tried else None
        raise UncoordinatedWriteError(text, version.sequence_number, tried)

    async def _try(self) -> WriteResult | None:
        copies = self._remembered_copies()
        if not copies or not self._lies_in(copies):  # another client may have made the file longer
            copies = await self._looked_up_copies()
        if not copies:
            return None
        key = self._known.signing_key
        version = next(iter(copies.values())).version
        assert version is not None
        self._version, self._found = version, len(copies)
        if key is None or version.format is not Format.MDMF:
            return None
        update = RangeUpdate(
            version, self._offset, len(self._data), self._slot.cap.readonly().secret
        )
        if update.geometry.is_too_fine:
            # Readers do not accept segments as small as those of this file; a file that is written whole gets
            # segments of the usual size.
            return None
        for copy in copies.values():
            assert copy.share is not None
            update.add_share(copy.share)
        if not await self._read(update, copies):
            self._known.forget_version()
            return None
        return await self._write(update, copies, key)

    def _lies_in(self, copies: dict[int, Copy]) -> bool:
        return all(
            c.version is not None and self._offset <= c.version.size for c in copies.values()
        )

    def _remembered_copies(self) -> dict[int, Copy]:
        """
        Return one copy of each share as this client's last write left it; empty if the cache does not know
        all shares.
        """
        known = self._known
        version, key = known.version, known.signing_key
        if version is None or key is None or version.format is not Format.MDMF:
            return {}
        if version.sequence_number < known.sequence_number:
            return {}
        sections = new_sections(version.geometry, len(key.public_der), len(key.encrypted))
        header = Header(version, sections).pack()
        held = known.holders(self._slot.peers)
        if len(held) < len(known.copies):
            return {}  # a copy that is not written would keep the old version
        copies: dict[int, Copy] = {}
        self._spare = []
        for peer, numbers in held.items():
            for number in numbers:
                share = MutableShare(number)
                share.put(0, header)
                copy = Copy(peer, number, header, share, version)
                if copies.setdefault(number, copy) is not copy:
                    self._spare.append(copy)
        return copies if len(copies) == version.total_shares else {}

    async def _looked_up_copies(self) -> dict[int, Copy]:
        """
        Query servers and return one copy of each share of the best version; empty if not all its shares
        exist.
        """
        slot = self._slot
        book = VerifiedVersions(slot.cap, signing_key=self._known.signing_key)
        survey = ServermapUpdate(slot, book, slot.settings.read_bytes, {}, self._usual)
        found = await survey.for_writer(self._known.newest, quorum(slot, self._usual[1]))
        best = found.choice().best
        if best is None or best.sequence_number < self._known.sequence_number:
            return {}  # a newer version was seen, which a write must not hide
        self._version, self._found = best, len(found.holders(best))
        if not found.choice().healthy() or found.answered < quorum(slot, self._usual[1]):
            return {}
        self._open_key(found, book, best)
        copies: dict[int, Copy] = {}
        self._spare = []
        for number, held in found.holders(best).items():
            for each in held:
                share = each.share
                assert share is not None
                assert share.header is not None
                copy = Copy(each.peer, number, share.header.pack(), share, best)
                if copies.setdefault(number, copy) is not copy:
                    self._spare.append(copy)
        if any(copy.head != copies[copy.number].head for copy in self._spare):
            return {}  # copies of a share differ, so the same changed bytes do not fit into all
        return copies

    def _open_key(self, found: ServerMap, book: VerifiedVersions, version: Version) -> None:
        for copies in found.holders(version).values():
            with suppress(CorruptionError):
                share = copies[0].share
                if share is not None and book.open_signing_key(share) is not None:
                    self._known.signing_key = book.signing_key
                    return

    async def _read(self, update: RangeUpdate, copies: dict[int, Copy]) -> bool:
        """Read the bytes that the update needs; return False if some cannot be read."""
        with_blocks = set(sorted(copies)[: update.version.required_shares])
        while not update.is_ready:
            wanted = [
                (copies[number], span)
                for number in copies
                for span in update.missing(number, number in with_blocks)
            ]
            if update.lacking_shares:
                return False
            if wanted:
                reads = [Deferred.fromCoroutine(self._fetch(copy, *span)) for copy, span in wanted]
                try:
                    await all_ended(reads)
                except (ServerError, CorruptionError):
                    return False
            job = update.next_job()
            if job is not None:
                result = await self._slot.workers.run_if_large(
                    update.version.segment_bytes, job.run
                )
                if not update.finish(result):
                    return False
            elif not wanted:
                return False
        return True

    async def _fetch(self, copy: Copy, start: int, end: int) -> None:
        data = await self._slot.read(copy.peer, copy.number, start, end - start)
        assert copy.share is not None
        copy.share.answered(start, end - start, data)

    async def _write(
        self, update: RangeUpdate, copies: dict[int, Copy], key: SigningKey
    ) -> WriteResult | None:
        salts = [os.urandom(SALT_BYTES) for _ in update.touched]
        highest = max(update.version.sequence_number, self._known.sequence_number)
        try:
            encoded = await self._slot.workers.run_if_large(
                6 * len(self._data),
                update.encode,
                self._data,
                next_sequence_number(highest),
                key,
                salts,
            )
        except CorruptionError:
            return None
        places: ExpectedHeads = {}
        heads: dict[Peer, dict[int, bytes]] = {}
        for copy in (*copies.values(), *self._spare):
            assert len(copy.head) == MAX_HEADER_BYTES
            places.setdefault(copy.peer, {})[copy.number] = copy.head
            heads.setdefault(copy.peer, {})[copy.number] = copy.head
        publication = Publish(self._slot, encoded, places, heads, may_move=False)
        self.tried.append(encoded.version)
        self._files.begin(self._slot.storage_index, self._known, encoded.version)
        first = leader_of_range(self._slot, self._known, places, encoded.version)
        outcome = await publication.run(first)
        if not outcome.is_clean:
            self._left_some = outcome.may_be_stored
            self._known.forget_version()
            self._known.contended_s = self._slot.clock.seconds()
            return None
        remember(self._files, self._slot, encoded, None, outcome, heads)
        return write_result(self._slot, encoded.version, outcome, len(self.tried))
