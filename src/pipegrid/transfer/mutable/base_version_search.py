"""Find the version on which a write is based."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from twisted.internet.defer import Deferred

from pipegrid.core.mutable.keys import SigningKey, open_signing_key
from pipegrid.core.mutable.mutable_share import Part, VerifiedVersions
from pipegrid.core.mutable.versions import Choice, Version, checkstring_order
from pipegrid.errors import CorruptionError, NotEnoughSharesError, ServerError, UsageError
from pipegrid.reactor.deferreds import gather
from pipegrid.transfer.mutable.mutable_failure_messages import nothing_to_change, rollback
from pipegrid.transfer.mutable.publish import PublishOutcome, check_quorum
from pipegrid.transfer.mutable.retrieve import read_whole
from pipegrid.transfer.mutable.servermap import (
    HEAD_BYTES,
    ServerMap,
    ServermapUpdate,
    is_settled,
    is_whole,
)
from pipegrid.transfer.mutable.slot_client import Slot, quorum
from pipegrid.transfer.mutable.version_cache import Base, CachedVersion
from pipegrid.transfer.peers import Peer

# Servers that refuse writes even though the writes expect exactly the shares that these servers have shown.
#
# When an honest server refuses a write, the writer's next query shows what another client has written there
# meanwhile: a signed version that is new on that server, with a number not lower than the base of the refused
# write. A bad server may refuse again and again and show no such version, or show only old versions that it
# has kept. It would delay the writer until the time limit, even if all other servers accept. So such a server
# is left out of this change, as if it were unreachable. To be acknowledged, a write still needs the same
# number of servers.
#
# A server that did not respond to the query is not judged: it may have a version that must not be
# overwritten.

REFUSALS = 3
"""Number of refusals in a row, without a version of another client, after which a server is left out."""


class RefusingServers:
    """
    What servers have shown and refused during one change.

    Attributes:
        left_out: the servers to which this change no longer writes; maps each to the reason.
    """

    def __init__(self) -> None:
        self.left_out: dict[Peer, ServerError] = {}
        self._shown: dict[Peer, set[Version]] = {}
        self._heard: set[Peer] = set()
        self._refusals: Counter[Peer] = Counter()
        self._least = 0

    def heard(self, found: ServerMap, own: Collection[Version]) -> None:
        """
        Record a query's result. ``own``: versions of this client, which do not prove another client's write.
        """
        self._heard = set(found.copies)
        for peer, copies in found.copies.items():
            versions = {copy.version for copy in copies.values() if copy.version is not None}
            shown = self._shown.setdefault(peer, set())
            if any(v.sequence_number >= self._least for v in versions - shown - set(own)):
                self._refusals[peer] = 0
            shown |= versions

    def refused(self, outcome: PublishOutcome, base: Version) -> None:
        """
        Record a write that was refused or found unknown shares. ``base``: the version, found by the last
        query, from which the written version was made.
        """
        self._least = base.sequence_number
        for peer in {*outcome.refused, *outcome.surprises} & self._heard:
            self._refusals[peer] += 1
            if self._refusals[peer] >= REFUSALS:
                self.left_out[peer] = ServerError(
                    f"{peer.name} has refused {REFUSALS} writes in a row of what it showed before "
                    f"each, and no other client has written there; it was left out",
                    peer.name,
                )


# What servers showed when they refused a write; used for servers that do not respond to queries in time.
# Pure.
#
# Writes and queries use different connections, and a response to a query is longer. So a server may be silent
# in every query and refuse every write because of a share that the writer does not expect: even a single
# writer would retry until the time limit. Therefore the next write expects the shares that the server showed
# when it refused.
#
# This applies only to shares that are older than the base of the refused write, or that belong to the base or
# to a version of this client. Any other share may belong to a version that was acknowledged to its writer:
# before a write may be based on that version or replace it, a query must find it on some server. In any case
# the server tests whether it has the shares that the write expects.


class LastSeen:
    """The shares that each server was last seen to have, if a write may expect these shares."""

    def __init__(self) -> None:
        self._left: dict[Peer, dict[int, bytes]] = {}
        self._uncertain: set[Peer] = set()
        self._harmless: set[bytes] = set()

    def written(
        self, outcome: PublishOutcome, tried: Version, base: Version, own: Iterable[Version]
    ) -> None:
        """
        Record a write that was refused or found unknown shares.

        Args:
            tried: the version that was written.
            base: the version from which ``tried`` was made.
            own: versions of earlier attempts.
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
                self._uncertain.discard(peer)
            elif not all(head in harmless or _is_older(head, base) for head in left.values()):
                self._uncertain.add(peer)

    def fill_in(self, found: ServerMap) -> dict[Peer, dict[int, bytes]]:
        """
        Return the first bytes of each share on each server: from the query, or from the last write for
        servers that did not respond to the query.
        """
        self._left = {p: left for p, left in self._left.items() if p not in found.copies}
        self._uncertain -= found.copies.keys()
        expected = {p: left for p, left in self._left.items() if p not in self._uncertain}
        return found.heads() | expected


def _is_older(head: bytes, version: Version) -> bool:
    """Return whether a share belongs to an older version, or to no valid version."""
    order = checkstring_order(head)
    return order is None or order[0] < version.sequence_number


# Finding the base of the next version of a mutable file: by querying servers, or in the cache.
#
# ``Modification`` describes what is done if no version can be read, or if other clients' versions are
# unfinished.

REFUSAL_BYTES = 4000
"""Bytes of each share in the response to a write with a cached base: enough to reread a small file."""


Redo = Callable[[bytes, bytes, bytes], bytes | None]
"""
A function of three contents: the one to which an edit was applied, the result of the edit, and the current
one. Returns the current content if it contains the edit, perhaps with later changes; returns None if the edit
must be applied.
"""


class ModifyOptions(NamedTuple):
    """
    When an edit of a mutable file is applied, and what it may replace.

    Attributes:
        replaces: the edit ignores the old content, and must not hide another client's new content: if another
            client's write has won, that is an error.
        always: write a new version even if the content is equal or the state is unclear (repair).
        merge: merges the contents of several versions with the same number; None: only the highest version is
            used.
        redo: recognizes an edit in content that contains it already; None: the edit is applied again.
        is_uncertain: returns whether a part of the edit failed the last time; if that was on cached content,
            the edit is applied again, to the content on servers.
        tried: versions that were written for the same edit and had conflicts. They are this client's own and
            unfinished, so another client's version takes precedence.
    """

    replaces: bool = False
    always: bool = False
    merge: Callable[[Sequence[bytes]], bytes] | None = None
    redo: Redo | None = None
    is_uncertain: Callable[[], bool] = lambda: False
    tried: Iterable[Version] = ()


class BaseSearch:
    """
    The search of one change for its base, in one or more queries.

    Args:
        known: what is cached of the file.
        how: what the change may replace.
        wait: awaited before another query; raises when the time limit has passed.

    Attributes:
        book: the proven keys and versions.
        own: the versions that were tried; maps each to its content, or to None if the content is unknown.
        last: the base of the last attempt; None before the first conflict.
        last_seen: the shares that servers showed in earlier attempts.
        contrary: records servers that refuse every write.
        dirty: whether a new version must be written even if the edit changes nothing.
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
        self._how = how
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
        """
        Versions that this client has begun, for this change or an earlier one; finding such a version is no
        conflict.
        """
        return {*self.own, *self._known.begun}

    def perhaps_stored(self, version: Version, content: bytes) -> None:
        """Record a version that was written, and may be found by the next query."""
        self.dirty = True
        self.own[version] = content

    def tried(self, version: Version, content: bytes, base: Base) -> None:
        """Record a version that was made from this base and had a conflict."""
        self.perhaps_stored(version, content)
        self.last = base

    def remembered(self) -> Base | None:
        """Return the cached base if a write can start from it without a query; otherwise None."""
        known = self._known
        self._open_remembered_key()
        if self._how.always or known.version is None or known.signing_key is None:
            return None
        if known.content is None and not self._how.replaces:
            return None
        if known.version.sequence_number < known.sequence_number or known.is_uncertain:
            return None
        head = known.version.signed_prefix[:HEAD_BYTES]
        held = known.holders(self._slot.peers)
        heads = {peer: dict.fromkeys(numbers, head) for peer, numbers in held.items()}
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

    async def look(self, everyone: bool) -> Base:
        """Query servers until it is clear which version is the base."""
        while True:
            survey = ServermapUpdate(
                self._slot,
                self.book,
                self._slot.settings.write_read_bytes,
                self._known.holders(self._slot.peers),
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
                # The chosen version may have been overwritten while it was read, so query again; if the same
                # version is chosen again, raise.
                if not self._is_new(found):
                    raise
                base = None
            if base is not None:
                return base
            await self._wait()
            everyone = True

    def _is_new(self, found: ServerMap) -> bool:
        """Return whether the best version has not failed before, and record that it has failed now."""
        best = found.choice().best
        if best is None or best in self._failed:
            return False
        self._failed.add(best)
        return True

    async def _base_of(self, found: ServerMap) -> Base | None:
        """Return the base, or None if servers must be queried again."""
        self.contrary.heard(found, self.begun)
        choice = found.choice()
        unfinished = [v for v in choice.newer_unrecoverable if v not in self.own]
        if choice.best is None:
            base = self._base_in_memory(found, choice)
            if base is not None:
                return base
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
        if not self._how.replaces:
            version = next((v for v in heads if v not in self.own), version)
        wanted = heads if self._how.merge is not None else [version]
        opening: Deferred[Any] = Deferred.fromCoroutine(self._open_key(found, version))
        reading: list[Deferred[Any]] = [
            Deferred.fromCoroutine(self._content(found, each)) for each in wanted
        ]
        self._known.signing_key, *contents = await gather([opening, *reading])
        content = contents[0]
        if len(contents) > 1 and self._how.merge is not None:
            self.dirty = True
            content = self._how.merge(contents)
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
        """
        Return whether too few servers responded to the first query: then the caller queries again, since dead
        connections have been renewed meanwhile.

        Raises:
            UnhappyError: too few servers responded to a later query.
        """
        if found.answered < quorum(self._slot, version.total_shares) and not self._asked_again:
            self._asked_again = True
            return True
        check_quorum(self._slot, found, version)
        return False

    async def _content(self, found: ServerMap, version: Version) -> bytes | None:
        own = self.own.get(version)
        if own is not None:
            return own
        if self._how.replaces and not self._how.always:
            return None
        known = self._known
        if known.version == version and known.content is not None:
            return known.content
        check_size(self._slot, version.size)
        # If this version turns out to be damaged, a repair returns to an older version; any other change
        # fails.
        return await read_whole(
            self._slot, found, version, self._spoilt.update if self._how.always else None
        )

    def _base_in_memory(self, found: ServerMap, choice: Choice) -> Base | None:
        """
        Return the base of the last attempt if it is still the latest version that could be read.

        A version made from a later base would have a higher sequence number, and no server reports one. Nor
        can the servers that did not respond hold such a version: other servers would have shares of it.
        """
        last = self.last
        if last is None or (last.content is None and not self._how.replaces):
            return None
        if found.failed and len(found.failed) >= last.version.required_shares:
            return None
        if choice.highest_sequence_number > last.highest + 1:
            return None
        check_quorum(self._slot, found, last.version)
        return Base(
            last.version,
            last.content,
            found.heads(),
            choice.highest_sequence_number,
            is_own=last.is_own,
        )

    def _check_rollback(self, best: Version) -> None:
        if self._how.always or self._how.replaces:
            return  # the new version gets a higher number than every version seen
        if best.sequence_number < self._known.sequence_number:
            raise rollback(best, self._known)

    async def _open_key(self, found: ServerMap, version: Version) -> SigningKey:
        """Return the signing key, from any share that has it."""
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
        """Return the base that follows from the responses to a refused write; None if they do not suffice."""
        found = ServerMap(self.book)
        for peer, seen in outcome.seen.items():
            found.heard(peer, seen, REFUSAL_BYTES)
        found.failed.update(outcome.failed)
        if not is_settled(found, quorum(self._slot, self._usual[1]), self._known.newest):
            return None
        if not is_whole(found, len(self._slot.peers)):
            return None  # servers that were not written may have copies, too
        try:
            return await self._base_of(found)
        except (NotEnoughSharesError, CorruptionError):
            return None  # shares were overwritten meanwhile, so the caller must query


def check_size(slot: Slot, size: int) -> None:
    """Raise UsageError if a file of this size is too long to be written as a whole."""
    most = slot.settings.max_content_bytes
    if size > most:
        raise UsageError(
            f"this mutable file would have {size} bytes, and {most} are the most that can be written as "
            "a whole; store it as immutable files, or change an MDMF file in part"
        )
