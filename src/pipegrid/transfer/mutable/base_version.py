"""Version on which a write is based."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core.mutable.keys import SigningKey, open_signing_key
from pipegrid.core.mutable.share import Part, VerifiedVersions
from pipegrid.core.mutable.versions import Choice, Version, checkstring_order
from pipegrid.errors import CorruptionError, NotEnoughSharesError, ServerError, UsageError
from pipegrid.reactor.deferreds import gather
from pipegrid.transfer.mutable.mutable_failure_messages import nothing_to_change, rollback
from pipegrid.transfer.mutable.publish import PublishOutcome, check_quorum
from pipegrid.transfer.mutable.retrieve import read_whole
from pipegrid.transfer.mutable.servermap import (
    HEAD_BYTES,
    Hints,
    ServerMap,
    ServermapUpdate,
    is_settled,
    is_whole,
)
from pipegrid.transfer.mutable.slot import Slot, quorum
from pipegrid.transfer.mutable.version_cache import Base, CachedVersion
from pipegrid.transfer.peers import Peer

# Servers that refuse what they have just said that they expect: from looks and refusals to whom to leave out.
#
# Whoever is refused by an honest server finds there, when it looks again, what somebody else has written
# meanwhile: a version that is signed, new there, and has no lower number than that which the refused
# write was made from. A server that refuses again and again, and each time shows nothing of the kind, but
# perhaps one more of the old versions that it has kept, would keep a writer busy until its patience ends,
# alone against all the others. It is left out of this change, as if it could not be reached: what is
# acknowledged without it still needs as many servers as ever.
#
# Who did not answer the look is not judged: it may have what must not be written over (``told``).

REFUSALS = 3
"""So many in a row, without a sign of anybody else, are enough."""


class RefusingServers:
    """
    What servers have said in the course of one change.

    Attributes:
        left_out: servers that are not to be written, and why.
    """

    def __init__(self) -> None:
        self.left_out: dict[Peer, ServerError] = {}
        self._shown: dict[Peer, set[Version]] = {}
        self._heard: set[Peer] = set()
        self._refusals: Counter[Peer] = Counter()
        self._least = 0

    def heard(self, found: ServerMap, own: Collection[Version]) -> None:
        """Servers have been looked at; ``own``: versions that say nothing of somebody else."""
        self._heard = set(found.copies)
        for peer, copies in found.copies.items():
            versions = {copy.version for copy in copies.values() if copy.version is not None}
            shown = self._shown.setdefault(peer, set())
            if any(v.sequence_number >= self._least for v in versions - shown - set(own)):
                self._refusals[peer] = 0
            shown |= versions

    def refused(self, outcome: PublishOutcome, base: Version) -> None:
        """A write that was made from this version, found in that look, has met something."""
        self._least = base.sequence_number
        for peer in {*outcome.refused, *outcome.surprises} & self._heard:
            self._refusals[peer] += 1
            if self._refusals[peer] >= REFUSALS:
                self.left_out[peer] = ServerError(
                    f"{peer.name} has refused {REFUSALS} writes in a row of what it showed before "
                    f"each, and no other client has written there; it was left out",
                    peer.name,
                )


# What servers showed when they were written to, for those that do not answer in time when they are asked:
# pure.
#
# Writes and questions go on connections of their own, and an answer to a question is the longer one. So a
# server may be silent in every look, and refuse every write for the share that nobody expects there: a writer
# that is alone would try until its patience ends. What it showed when it refused is expected of it next time.
#
# Only what was older than the version that the refused write was made from is expected so, or part of it
# or of a version of one's own. Anything else may be what somebody was told to be stored: it has to be
# seen in a look, on whatever server, which decides what to build on; what was built on then is harmless.
# In any case the server tests what is expected of it.


class LastSeen:
    """What servers were last seen to have, as far as it can be expected of them."""

    def __init__(self) -> None:
        self._left: dict[Peer, dict[int, bytes]] = {}
        self._doubtful: set[Peer] = set()
        self._harmless: set[bytes] = set()

    def written(
        self, outcome: PublishOutcome, tried: Version, base: Version, own: Iterable[Version]
    ) -> None:
        """
        A write has met somebody or something.

        Args:
            tried: what was written.
            base: what it was made from.
            own: what was tried before.
        """
        harmless = self._harmless
        harmless.update(each.signed_prefix[:HEAD_BYTES] for each in (base, tried, *own))
        for peer, seen in outcome.seen.items():
            left = {number: data[:HEAD_BYTES] for number, data in seen.items()}
            for number, peers in outcome.placed.items():
                if peer in peers:
                    left[number] = tried.signed_prefix[:HEAD_BYTES]
            self._left[peer] = left
            if all(head in harmless for head in left.values()):
                self._doubtful.discard(peer)
            elif not all(head in harmless or _is_older(head, base) for head in left.values()):
                self._doubtful.add(peer)

    def fill_in(self, found: ServerMap) -> dict[Peer, dict[int, bytes]]:
        """Return how each share begins on each server that was heard now, or else when it was written to."""
        self._left = {p: left for p, left in self._left.items() if p not in found.copies}
        self._doubtful -= found.copies.keys()
        expected = {p: left for p, left in self._left.items() if p not in self._doubtful}
        return found.heads() | expected


def _is_older(head: bytes, version: Version) -> bool:
    """Return whether a share is of an older version, or of none at all."""
    order = checkstring_order(head)
    return order is None or order[0] < version.sequence_number


# What the next version of a mutable file is made from: found by looking at servers, or remembered.
#
# Where nothing can be read any more, or others' versions are unfinished, see ``modifying`` for what is done.

REFUSAL_BYTES = 4000
"""Of each share, in the answer to a write: with small files a refused writer has all it needs in it."""


Redo = Callable[[bytes, bytes, bytes], bytes | None]
"""
From content that an edit was applied to, what became of it, and what is there now, to the content if the edit
has taken effect in it; None: it is to be applied.
"""


@attrs.frozen(eq=False)
class ModifyOptions:
    """
    When an edit of a mutable file is applied, and what it may replace.

    Attributes:
        replaces: the edit does not look at the old content, and must not hide somebody else's new one: if
            another writer is met, and has won, that is an error.
        always: write a new version even if the content is equal, or the state is unclear (repair).
        merge: makes one content of those of several versions with one number; None: the highest is taken.
        redo: finds an edit in content that has it already; None: it is applied again.
        in_doubt: whether a part of the edit failed with the content that it was last given: then it is given
            what servers have, if that was only remembered.
        tried: versions that were written for the same edit and met others: no more than one's own that is
            unfinished, so what another one wrote goes before them.
    """

    replaces: bool = False
    always: bool = False
    merge: Callable[[Sequence[bytes]], bytes] | None = None
    redo: Redo | None = None
    in_doubt: Callable[[], bool] = lambda: False
    tried: Iterable[Version] = ()


class BaseSearch:
    """
    The search of one change for its base, which may take several looks.

    Args:
        known: what is remembered of the file.
        how: what the change may replace.
        wait: before it is looked again; raises when patience has ended.

    Attributes:
        book: of the shares that were seen.
        own: versions that were tried, and their content, if it is known here.
        last: what the last try was made from.
        last_seen: what servers were left with by earlier tries.
        contrary: servers that refuse whatever is tried.
        dirty: what is there has to be written anew, even if the edit changes nothing.
    """

    def __init__(
        self,
        slot: Slot,
        known: CachedVersion,
        usual: tuple[int, int],
        wait: Callable[[], Awaitable[None]],
        how: ModifyOptions,
    ) -> None:
        self._slot = slot
        self._known = known
        self._usual = usual
        self._wait = wait
        self._replaces = how.replaces
        self._always = how.always
        self._merge = how.merge
        self._asked_again = False
        self._looks: dict[Version, int] = {}
        self._failed: set[Version] = set()
        self._spoilt: dict[tuple[str, int, Version], CorruptionError] = {}
        self.book = VerifiedVersions(slot.cap, signing_key=known.signing_key)
        self.own: dict[Version, bytes | None] = dict.fromkeys(how.tried)
        self.last: Base | None = None
        self.last_seen = LastSeen()
        self.contrary = RefusingServers()
        self.dirty = how.always or bool(self.own)

    @property
    def begun(self) -> set[Version]:
        """Versions that this client has begun, for this change and before: whoever meets them is alone."""
        return {*self.own, *self._known.begun}

    def perhaps_stored(self, version: Version, content: bytes) -> None:
        """A version was written, and may be what is found next."""
        self.dirty = True
        self.own[version] = content

    def tried(self, version: Version, content: bytes, base: Base) -> None:
        """A version was written that was made from this base, and has met others."""
        self.perhaps_stored(version, content)
        self.last = base

    def remembered(self) -> Base | None:
        """Return what is remembered, if that is enough to write at once."""
        known = self._known
        self._open_remembered_key()
        if self._always or known.version is None or known.signing_key is None:
            return None
        if known.content is None and not self._replaces:
            return None
        if known.version.sequence_number < known.sequence_number or known.is_doubtful:
            return None
        head = known.version.signed_prefix[:HEAD_BYTES]
        by_id = {peer.identity.server_id: peer for peer in self._slot.peers}
        heads = {
            by_id[server]: dict.fromkeys(numbers, head)
            for server, numbers in known.copies.items()
            if server in by_id
        }
        if not heads:
            return None
        self.book.trust(known.version)
        return Base(known.version, known.content, heads, known.sequence_number, is_warm=True)

    def _open_remembered_key(self) -> None:
        known = self._known
        if known.signing_key is None and known.encrypted_key:
            try:
                known.signing_key = open_signing_key(known.encrypted_key, self._slot.cap, 0)
            except CorruptionError:
                known.encrypted_key = b""
        if known.signing_key is not None and self.book.signing_key is None:
            self.book = VerifiedVersions(self._slot.cap, signing_key=known.signing_key)

    def _hints(self) -> Hints:
        by_id = {peer.identity.server_id: peer for peer in self._slot.peers}
        return {
            by_id[server]: frozenset(numbers)
            for server, numbers in self._known.copies.items()
            if server in by_id
        }

    async def look(self, everyone: bool) -> Base:
        """Ask servers until it is clear what to build on."""
        while True:
            survey = ServermapUpdate(
                self._slot,
                self.book,
                self._slot.settings.write_read_bytes,
                self._hints(),
                self._usual,
                opens_key=True,
                spoilt=self._spoilt,
            )
            wanted = quorum(self._slot, self._usual[1])
            if everyone:
                found = await survey.everyone(wanted)
            else:
                found = await survey.for_writer(self._known.newest, wanted)
            try:
                base = await self._base_of(found)
            except (NotEnoughSharesError, CorruptionError):
                # What was chosen may have been written over while it was read; what stays is looked at once.
                if not self._is_new(found):
                    raise
                base = None
            if base is not None:
                return base
            await self._wait()
            everyone = True

    def _is_new(self, found: ServerMap) -> bool:
        """Return whether the best version has not failed before."""
        best = found.choice().best
        if best is None or best in self._failed:
            return False
        self._failed.add(best)
        return True

    async def _base_of(self, found: ServerMap) -> Base | None:
        """Return what to build on, or None if it has to be looked again."""
        self.contrary.heard(found, self.begun)
        choice = found.choice()
        unfinished = [v for v in choice.newer_unrecoverable if v not in self.own]
        if choice.best is None:
            base = self._base_in_memory(found, choice)
            if base is not None:
                return base
            if not unfinished:
                raise nothing_to_change(found, self._usual[0])
        if unfinished:
            newest = unfinished[0]
            self._looks[newest] = self._looks.get(newest, 0) + 1
            if self._looks[newest] <= self._slot.settings.unfinished_looks:
                return None
        if choice.best is None:
            raise nothing_to_change(found, self._usual[0])
        if self._is_too_few(found, choice.best):
            return None
        self._check_rollback(choice.best)
        heads = [choice.best, *choice.rivals]
        version = choice.best
        if not self._replaces:
            version = next((v for v in heads if v not in self.own), version)
        wanted = heads if self._merge is not None else [version]
        opening: Deferred[Any] = Deferred.fromCoroutine(self._open_key(found, version))
        reading: list[Deferred[Any]] = [
            Deferred.fromCoroutine(self._content(found, each)) for each in wanted
        ]
        self._known.signing_key, *contents = await gather([opening, *reading])
        content = contents[0]
        if len(contents) > 1 and self._merge is not None:
            self.dirty = True
            content = self._merge(contents)
        if len(heads) > 1 or unfinished:
            self.dirty = True
        own = len(contents) == 1 and self.own.get(version) is not None
        spoilt = [each.sequence_number for _, _, each in self._spoilt]
        highest = max([choice.highest_sequence_number, *spoilt])
        shares = self.last_seen.fill_in(found)
        if shares.keys() - found.copies.keys():
            highest = max([highest, *(v.sequence_number for v in self.begun)])
        return Base(version, content, shares, highest, is_own=own)

    def _is_too_few(self, found: ServerMap, version: Version) -> bool:
        """Return whether to ask once more, since connections may have been dead that are made anew now."""
        if found.answered < quorum(self._slot, version.total_shares) and not self._asked_again:
            self._asked_again = True
            return True
        check_quorum(self._slot, found, version)
        return False

    async def _content(self, found: ServerMap, version: Version) -> bytes | None:
        own = self.own.get(version)
        if own is not None:
            return own
        if self._replaces and not self._always:
            return None
        known = self._known
        if known.version == version and known.content is not None:
            return known.content
        check_size(self._slot, version.size)
        # Only a repair goes back behind a version that turns out to be spoilt.
        return await read_whole(
            self._slot, found, version, self._spoilt.update if self._always else None
        )

    def _base_in_memory(self, found: ServerMap, choice: Choice) -> Base | None:
        """
        Return the last try's base if it was the last version that could be read.

        No version is there with a number that needs a later one to have been made from. And none that
        others hold can have been made from a later one either: it would be among those that are there.
        """
        last = self.last
        if last is None or (last.content is None and not self._replaces):
            return None
        if found.failed and len(found.failed) >= last.version.required_shares:
            return None
        if choice.highest_sequence_number > last.highest + 1:
            return None
        check_quorum(self._slot, found, last.version)
        return attrs.evolve(
            last, heads=found.heads(), highest=choice.highest_sequence_number, is_warm=False
        )

    def _check_rollback(self, best: Version) -> None:
        if self._always or self._replaces:
            return  # what is written is above everything that was seen, in any case
        if best.sequence_number < self._known.sequence_number:
            raise rollback(best, self._known)

    async def _open_key(self, found: ServerMap, version: Version) -> SigningKey:
        """Return the signing key, from whatever share has it."""
        if self.book.signing_key is not None:
            return self.book.signing_key
        problem: Exception | None = None
        for copies in found.holders(version).values():
            for copy in copies:
                share = copy.share
                assert share is not None
                try:
                    for start, end in share.missing(Part.PRIVATE_KEY):
                        data = await self._slot.read(copy.peer, copy.number, start, end - start)
                        share.answered(start, end - start, data)
                    key = self.book.open_signing_key(share)
                except (CorruptionError, ServerError) as error:
                    problem = error
                    continue
                if key is not None:
                    return key
        raise problem or NotEnoughSharesError("no share has the private key", 0, 1)

    async def of_answers(self, outcome: PublishOutcome) -> Base | None:
        """Return what to build on from the answers to a refused write, if they tell enough."""
        found = ServerMap(self.book)
        for peer, seen in outcome.seen.items():
            found.heard(peer, seen, REFUSAL_BYTES)
        for peer, error in outcome.failed.items():
            found.failed_to_answer(peer, error)
        wanted = quorum(self._slot, self._usual[1])
        if not is_settled(found, wanted, self._known.newest):
            return None
        if not is_whole(found, len(self._slot.peers)):
            return None  # who was not written may have copies, too
        try:
            return await self._base_of(found)
        except (NotEnoughSharesError, CorruptionError):
            return None  # written over meanwhile; a look finds what is there


def check_size(slot: Slot, size: int) -> None:
    """Raise UsageError if a file of so many bytes cannot be written as a whole."""
    most = slot.settings.max_content_bytes
    if size > most:
        raise UsageError(
            f"this mutable file would have {size} bytes, and {most} are the most that can be written as "
            "a whole; store it as immutable files, or change an MDMF file in part"
        )
