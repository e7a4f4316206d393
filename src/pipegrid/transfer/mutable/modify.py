"""Modify a mutable file: read, apply the edit, write, retry."""

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
from pipegrid.transfer.mutable.base_version_search import (
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
    write_result,
)
from pipegrid.transfer.mutable.servermap import place
from pipegrid.transfer.mutable.slot_client import Slot
from pipegrid.transfer.mutable.version_cache import (
    Base,
    CachedVersion,
    VersionCache,
    remember,
    remember_base,
)
from pipegrid.transfer.peers import Peer

# Which server is written first, alone, when other clients may be writing the same mutable file: the leader.
#
# All writers choose the same leader: the first server of the file's ring that has a share. A writer whose
# write the leader refuses has changed no other server.

CAUTIOUS_S = 60.0
"""For this many seconds after a conflict with other writers, writes begin with the leader."""


def leader(slot: Slot, known: CachedVersion, places: ExpectedHeads) -> Peer | None:
    """Return the leader if there was a conflict with other writers recently; otherwise None."""
    met_s = known.contended_s
    if met_s is None or slot.clock.seconds() - met_s > CAUTIOUS_S:
        return None
    return _first_holder(slot, places)


def leader_of_range(
    slot: Slot, known: CachedVersion, places: ExpectedHeads, version: Version
) -> Peer | None:
    """
    Return the leader for a write of a range by a client that does not have the rest of the content; None if
    no leader is needed.

    If two such writers each get half of the shares and k is more than half, neither version can be read, and
    the file is lost. If the file is too long to be written whole, no client can restore it. So a leader is
    always used if k is more than half of the shares, or the file is too long to be written whole.
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


# Changing a mutable file until the change is part of its only version: query, apply the edit, write, retry.
#
# An edit is a function of the old content, so it can be applied again to content that other clients have
# written meanwhile. The change is done when every written server had the expected shares, and none had
# unknown ones. Until this is so:
#
# * **Conflict** (a test failed, or there is an unknown share): wait a random time, which doubles; query all
#   servers; apply the edit to the best version; write with a sequence number above all seen. From the
#   conflict on until a minute after the change, writes use a leader.
# * **A newer version that cannot be read**: another client's write is running, or was interrupted. Query
#   again a few times, then overwrite the version.
# * **A server that was silent when queried refuses the write**: the next write expects the shares that the
#   server showed when it refused (``LastSeen``).
# * **Too few servers respond** for a write to be acknowledged: write nothing. The servers that respond may
#   lack a version that was acknowledged to its writer, and a new version based on their shares would hide
#   that version.
# * **No version can be read any more**, because several writers have destroyed each other's versions: a
#   writer that has applied an edit still has the content to which it applied the edit. If no present version
#   derives from a later content, this content was the last version, and becomes the base again: nothing
#   acknowledged is lost.
# * **The best version is this client's own unfinished one, and another client's version has the same
#   number**: the other version is the base, since its writer may have reported success.
# * **The best version is this client's own unfinished one, without a rival**: it is written again unchanged,
#   to all servers.
#
# So after a response was lost, an edit may be applied to content that already contains this edit. The edit
# must tolerate this, or come with a function that recognizes the edit in the content (``redo``).
#
# Source: Tahoe-LAFS's ``dirnodes.rst``, and how 1.20 behaves.

ContentEdit = Callable[[bytes], bytes]
"""Maps old content to new content; equal content is not written. An edit may be applied more than once."""

REMEMBERED_TRIES = 8
"""Maximum number of uncertain writes kept for one change, to recognize their contents in a later query."""


class Modification:
    """
    One change of one file.

    Args:
        files: the cached versions of all files.
        edit: see ``ContentEdit``.
        usual: k and n of a file whose version is not known yet.
        random: returns a number from 0 up to 1.
        how: when the edit is applied, and what it may replace.

    Attributes:
        attempts: number of writes.
        unsure: number of writes that did not clearly succeed, but may be stored.
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
        self._how = how
        self._met_s: float | None = None
        self._wait_s = 0.0
        # For each write that may be stored: the content from which it was made, and the new content.
        self._tries: deque[tuple[bytes, bytes]] = deque(maxlen=REMEMBERED_TRIES)
        self.attempts = self.unsure = 0
        self._search = BaseSearch(slot, self._known, usual, self._wait, how)

    async def run(self) -> WriteResult:
        """
        Change the file.

        Raises:
            UncoordinatedWriteError: other clients write all the time, or (with ``replaces``) another client's
                write has won.
            NotEnoughSharesError: no version can be read.
            RollbackError: servers have only an older version than was seen before.
            UnhappyError: too few servers accepted shares.
            CorruptionError: the existing version is inconsistent.
            Exception: an exception that the edit raised; nothing is written in this case.
        """
        # A repair (``always``) must find every old share, so it queries all servers.
        base = self._search.remembered() or await self._search.look(everyone=self._how.always)
        while True:
            try:
                content = self._apply(base)
            except Exception:
                if not base.is_warm:
                    raise
                content = None
            if base.is_warm and (content is None or self._how.is_uncertain()):
                # The edit fails or changes nothing, so no write would test whether the cached version is
                # current.
                base = await self._search.look(everyone=False)
                continue
            if content is None:
                return self._unchanged(base)
            outcome, encoded = await self._publish(base, content)
            if outcome.is_clean:
                remember(self._files, self._slot, encoded, content, outcome, base.heads)
                return write_result(self._slot, encoded.version, outcome, self.attempts)
            self._search.contrary.refused(outcome, base.version)
            self._search.last_seen.written(
                outcome, encoded.version, base.version, self._search.begun
            )
            if outcome.may_be_stored:
                self._remember_try(base, encoded.version, content)
            if base.is_warm and not _was_there(base, outcome):
                # The cached version was out of date, which is no conflict: the responses show the current
                # version.
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
        Query what a change needs and cache it, so that the next change can write at once.

        Nothing is written. The result is cached only if all shares are known and belong to one version;
        otherwise the next change queries again. The next change also queries again if another client has
        written meanwhile.

        Raises:
            NotEnoughSharesError, RollbackError, CorruptionError, UncoordinatedWriteError: as ``run``.
        """
        if self._search.remembered() is None:
            remember_base(self._files, self._slot, await self._search.look(everyone=False))

    # Applying the edit.

    def _apply(self, base: Base) -> bytes | None:
        """Return the new content, or None if there is nothing to write."""
        old = base.content
        if self._how.replaces:
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
        """Record a version that may be stored, and so may be found by the next query."""
        self.unsure += 1
        self._search.perhaps_stored(tried, content)
        if self._how.redo is not None and base.content is not None and not base.is_own:
            self._tries.append((base.content, content))

    def _made_before(self, current: bytes) -> bytes | None:
        """
        Return the current content if it contains the edit of an earlier attempt, perhaps with later changes;
        otherwise None.
        """
        if self._how.redo is None:
            return None
        found = (self._how.redo(*each, current) for each in reversed(self._tries))
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
            geometry.total_shares, base.heads, self._slot.peers, unusable, widely=self._how.always
        )
        self.attempts += 1
        self._search.book.trust(encoded.version)
        self._files.begin(self._slot.storage_index, self._known, encoded.version)
        publication = Publish(
            self._slot, encoded, places, base.heads, read_bytes=REFUSAL_BYTES if base.is_warm else 0
        )
        publication.outcome.failed.update(left_out)
        return await publication.run(leader(self._slot, self._known, places)), encoded

    # Conflicts with other writers.

    async def _wait(self, tried: Version | None = None) -> None:
        """
        Wait a random time, whose upper bound doubles with each call up to ``max_wait_s``; raise when the time
        limit has passed.
        """
        clock, settings = self._slot.clock, self._slot.settings
        # The limit applies to conflicts only: silent servers have their own time limit.
        if self._met_s is None:
            self._met_s = clock.seconds()
        elapsed_s = clock.seconds() - self._met_s
        if elapsed_s > settings.time_limit_s:
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
        Raise UncoordinatedWriteError if this change replaces the content, and another client's write has
        won.
        """
        if not self._how.replaces or self._how.always:
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
    """
    Return whether some server still had an expected share; a new share that was accepted proves nothing.
    """
    return any(
        number in base.heads.get(peer, {})
        for number, peers in outcome.placed.items()
        for peer in peers
    )
