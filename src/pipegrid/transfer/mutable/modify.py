"""Modify loop: read, apply, write, retry."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from twisted.internet.task import deferLater

from pipegrid.core.mutable.encoder import EncodedVersion, encode
from pipegrid.core.mutable.versions import (
    SALT_BYTES,
    MutableGeometry,
    Version,
    next_sequence_number,
)
from pipegrid.errors import UncoordinatedWriteError
from pipegrid.transfer.mutable.base_version import (
    REFUSAL_BYTES,
    BaseSearch,
    ModifyOptions,
    check_size,
)
from pipegrid.transfer.mutable.mutable_failure_messages import not_writable
from pipegrid.transfer.mutable.publish import (
    ExpectedHeads,
    Publish,
    PublishOutcome,
    WriteResult,
    check_happy,
    write_result,
)
from pipegrid.transfer.mutable.servermap import place
from pipegrid.transfer.mutable.slot import Slot
from pipegrid.transfer.mutable.version_cache import (
    Base,
    CachedVersion,
    VersionCache,
    remember,
    remember_base,
)
from pipegrid.transfer.peers import Peer

# Which server is written first, alone, when others may be writing the same mutable file.
#
# All writers agree on it: the first of the file's ring that has a share. Whoever is refused there has touched
# nothing else.

CAUTIOUS_S = 60.0
"""So long after others were met, writes have a leader from the start."""


def leader(slot: Slot, known: CachedVersion, places: ExpectedHeads) -> Peer | None:
    """Return the server to be written first, if others were met of late."""
    met_s = known.contended_s
    if met_s is None or slot.clock.seconds() - met_s > CAUTIOUS_S:
        return None
    return _first_holder(slot, places)


def leader_of_range(
    slot: Slot, known: CachedVersion, places: ExpectedHeads, version: Version
) -> Peer | None:
    """
    Return the server to be written first with a range, whose writer does not have the rest of the content.

    Two such writers whose versions have half of the shares each have destroyed the file if half are too few
    to read it; and nobody could write one whole that is too long for that. So they have a leader at any time.
    """
    is_too_long = version.size > slot.settings.max_content_bytes
    if is_too_long or 2 * version.required_shares > version.total_shares:
        return _first_holder(slot, places)
    return leader(slot, known, places)


def _first_holder(slot: Slot, places: ExpectedHeads) -> Peer | None:
    holders = (
        peer
        for peer in slot.peers
        if any(head is not None for head in places.get(peer, {}).values())
    )
    return next(holders, None)


# Changing a mutable file until the change is in the one version that is there: look, apply, write, and again.
#
# What is applied is an edit, a function of the old content, so that it can be applied again to what somebody
# else has made of the file meanwhile. It is done when every server that was written had what was
# expected, and none has shares beside that were not known. Until then:
#
# * **Met others** (a test failed, an unknown share): wait a random time that doubles, look at all servers,
#   apply the edit to the best version there, write with a number above all seen. From now on with a leader
#   (``publishing``), for a minute after as well.
# * **A newer version that cannot be read** is somebody's write in the middle, or one that was never ended. It
#   is looked at again some times, and then written over.
# * **A server refuses that was silent when it was asked**: what it showed then is expected of it the next
# time
#   (``lastseen``).
# * **Too few servers answer** for a write to be acknowledged: nothing is written. Those that answer may have
#   missed what others were told is stored, and a version made from theirs would hide it.
# * **Nothing can be read any more**, since many writers have destroyed each other's versions: whoever has
#   applied an edit has the content that it was applied to. If no version is there that was made from a
#   later one, it was the last, and is the base again: nothing that was acknowledged is lost.
# * **One's own unfinished version is the best**, beside another's with the same number: the other's is
# taken as
#   the base, since its author may have been told that it was done.
#
# * **One's own is the only best one**: it is written again as it is, to all.
#
# An edit may so be applied to content that has it already, after an answer was lost; it has to bear that, or
# come with a function that finds it there (``redo``).
#
# Source: the format reference, trees, 7.3 and 7.4.

ContentEdit = Callable[[bytes], bytes]
"""From the old content to the new one; equal content is not written. It may be applied more than once."""

REMEMBERED_TRIES = 8
"""So many writes of one change that may have been stored are looked for in what is there later."""


class Modification:
    """
    One change of one file.

    Args:
        known: what is remembered of it.
        edit: see ``ContentEdit``.
        how: when the edit is applied, and what it may replace.
        random: from 0 up to 1.

    Attributes:
        attempts: how often it was written.
        unsure: how often so that it may be stored, though that is not known.
    """

    def __init__(
        self,
        slot: Slot,
        files: VersionCache,
        edit: ContentEdit,
        usual: tuple[int, int],
        random: Callable[[], float],
        how: ModifyOptions,
    ) -> None:
        if not slot.can_write:
            raise not_writable()
        self._slot = slot
        self._files = files
        self._known = files.of(slot.storage_index)
        self._edit = edit
        self._random = random
        self._replaces = how.replaces
        self._always = how.always
        self._redo = how.redo
        self._in_doubt = how.in_doubt
        self._met_s: float | None = None
        self._wait_s = 0.0
        # What tries were made from, and made, that may be stored.
        self._tries: deque[tuple[bytes, bytes]] = deque(maxlen=REMEMBERED_TRIES)
        self.attempts = self.unsure = 0
        self._search = BaseSearch(slot, self._known, usual, self._wait, how)

    async def run(self) -> WriteResult:
        """
        Change the file.

        Raises:
            UncoordinatedWriteError: others write all the time, or (``replaces``) somebody else has won.
            NotEnoughSharesError: no version can be read.
            RollbackError: only an older version is there than was seen before.
            UnhappyError: too few servers took shares.
            CorruptionError: the version that is there is inconsistent.
            Exception: whatever the edit raises; nothing is written then.
        """
        # A repair is to find every old share.
        base = self._search.remembered() or await self._search.look(everyone=self._always)
        while True:
            try:
                content = self._apply(base)
            except Exception:
                if not base.is_warm:
                    raise
                content = None
            if base.is_warm and (content is None or self._in_doubt()):
                # It fails, or changes nothing, so that no server would test what is remembered.
                base = await self._search.look(everyone=False)
                continue
            if content is None:
                return self._unchanged(base)
            outcome, encoded = await self._publish(base, content)
            if outcome.is_clean:
                return self._done(encoded, content, outcome, base)
            self._search.contrary.refused(outcome, base.version)
            self._search.last_seen.written(
                outcome, encoded.version, base.version, self._search.begun
            )
            if outcome.may_be_stored:
                self._remember_try(base, encoded.version, content)
            if base.is_warm and not _was_there(base, outcome):
                # What was remembered is old: the answers tell what is there, and nobody says it was touched.
                self._known.forget_version()
                found = None if outcome.placed else await self._search.of_answers(outcome)
                base = found or await self._search.look(everyone=False)
                continue
            self._known.forget_version()
            self._known.contended_s = self._slot.clock.seconds()
            self._search.tried(encoded.version, content, base)
            await self._wait(encoded.version)
            base = await self._search.look(everyone=True)
            self._check_won(base, encoded.version)

    async def look_ahead(self) -> None:
        """
        Find out what a change needs to know and remember it, so that the next one is written at once.

        Nothing is written. What is found is remembered only if all is in order; the next change looks again
        if not, and if somebody else has written meanwhile.

        Raises:
            NotEnoughSharesError, RollbackError, CorruptionError, UncoordinatedWriteError: as ``run``.
        """
        if self._search.remembered() is None:
            remember_base(self._files, self._slot, await self._search.look(everyone=False))

    # Applying.

    def _apply(self, base: Base) -> bytes | None:
        """Return the new content, or None if there is nothing to write."""
        old = base.content
        if self._replaces:
            content = self._edit(b"" if old is None else old)
        elif base.is_own:
            assert old is not None
            content = old
        else:
            assert old is not None, "an edit needs the old content"
            made = self._made_before(old)
            content = self._edit(old) if made is None else made
            if content == old and not self._search.dirty:
                return None
        check_size(self._slot, len(content))
        return content

    def _remember_try(self, base: Base, tried: Version, content: bytes) -> None:
        """Remember what may be stored now, and be what is found next."""
        self.unsure += 1
        self._search.perhaps_stored(tried, content)
        if self._redo is not None and base.content is not None and not base.is_own:
            self._tries.append((base.content, content))

    def _made_before(self, current: bytes) -> bytes | None:
        """Return what is there if an earlier try is in it, by somebody who has built on that."""
        if self._redo is None:
            return None
        found = (self._redo(*each, current) for each in reversed(self._tries))
        return next((each for each in found if each is not None), None)

    def _unchanged(self, base: Base) -> WriteResult:
        self._known.saw(base.version)
        placed: dict[int, list[str]] = {}
        for peer, shares in base.heads.items():
            for number in shares:
                placed.setdefault(number, []).append(peer.name)
        return WriteResult(base.version, placed, self.attempts, written=False)

    # Writing.

    async def _publish(self, base: Base, content: bytes) -> tuple[PublishOutcome, EncodedVersion]:
        version = base.version
        key = self._known.signing_key
        assert key is not None
        geometry = MutableGeometry(
            version.format, len(content), version.required_shares, version.total_shares
        )
        salts = [os.urandom(SALT_BYTES) for _ in range(geometry.num_salts)]
        number = next_sequence_number(max(base.highest, self._known.sequence_number))
        encoded = await self._slot.workers.run_if_large(
            6 * len(content), encode, content, geometry, number, key, salts
        )
        left_out = self._search.contrary.left_out
        unusable = {*self._slot.wrong_enabler, *left_out}
        places: ExpectedHeads = place(
            geometry.total_shares, base.heads, self._slot.peers, unusable, widely=self._always
        )
        self.attempts += 1
        self._search.book.trust(encoded.version)
        self._files.begin(self._slot.storage_index, self._known, encoded.version)
        publication = Publish(
            self._slot, encoded, places, base.heads, read_bytes=REFUSAL_BYTES if base.is_warm else 0
        )
        publication.outcome.failed.update(left_out)
        return await publication.run(leader(self._slot, self._known, places)), encoded

    def _done(
        self, encoded: EncodedVersion, content: bytes, outcome: PublishOutcome, base: Base
    ) -> WriteResult:
        version = encoded.version
        remember(self._files, self._slot, encoded, content, outcome, base.heads)
        check_happy(self._slot, version, outcome)
        return write_result(self._slot, version, outcome, self.attempts)

    # Others.

    async def _wait(self, tried: Version | None = None) -> None:
        """Wait a random time, longer each time; give up when patience ends."""
        clock, settings = self._slot.clock, self._slot.settings
        if (
            self._met_s is None
        ):  # patience is for others: servers that are silent have their own time
            self._met_s = clock.seconds()
        elapsed_s = clock.seconds() - self._met_s
        if elapsed_s > settings.patience_s:
            raise UncoordinatedWriteError(
                f"others have been changing this mutable file for {elapsed_s:.0f} s, so this change could "
                "not be stored; try again later",
                None,
                None if tried is None else tried.sequence_number,
            )
        self._wait_s = min(max(2 * self._wait_s, settings.first_wait_s, 0.0), settings.max_wait_s)
        await deferLater(clock, self._wait_s * self._random())

    def _check_won(self, base: Base, tried: Version) -> None:
        """
        Raise UncoordinatedWriteError if this replaces the content, and another one has won.
        """
        if not self._replaces or self._always:
            return
        if base.version in self._search.begun:
            return
        if base.version.sequence_number >= tried.sequence_number:
            raise UncoordinatedWriteError(
                f"another client wrote this mutable file meanwhile, and version {base.version.name} is the "
                "current one; yours was not stored: read the current version, and write again if you "
                "still want to",
                base.version.sequence_number,
                tried.sequence_number,
            )


def _was_there(base: Base, outcome: PublishOutcome) -> bool:
    """Return whether a server had what was expected; that it takes what another one did not says nothing."""
    return any(
        number in base.heads.get(peer, {})
        for number, peers in outcome.placed.items()
        for peer in peers
    )
