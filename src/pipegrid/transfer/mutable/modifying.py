"""
Changing a mutable file until the change is in the one version that is there: look, apply, write, and again.

What is applied is an edit, a function of the old content, so that it can be applied again to what somebody
else has made of the file meanwhile. It is done when every server that was written had what was expected, and
none has shares beside that were not known. Until then:

* **Met others** (a test failed, an unknown share): wait a random time that doubles, look at all servers,
  apply the edit to the best version there, write with a number above all seen. From now on with a leader
  (``publishing``), for a minute after as well.
* **A newer version that cannot be read** is somebody's write in the middle, or one that was never ended. It
  is looked at again some times, and then written over.
* **A server refuses that was silent when it was asked**: what it showed then is expected of it the next time
  (``told``).
* **Too few servers answer** for a write to be acknowledged: nothing is written. Those that answer may have
  missed what others were told is stored, and a version made from theirs would hide it.
* **Nothing can be read any more**, since many writers have destroyed each other's versions: whoever has
  applied an edit has the content that it was applied to. If no version is there that was made from a
  later one, it was the last, and is the base again: nothing that was acknowledged is lost.
* **One's own unfinished version is the best**, beside another's with the same number: the other's is taken as
  the base, since its author may have been told that it was done.

* **One's own is the only best one**: it is written again as it is, to all.

An edit may so be applied to content that has it already, after an answer was lost; it has to bear that.

Source: the format reference, trees, 7.3 and 7.4.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from pipegrid.core.mutable.book import ShareBook
from pipegrid.core.mutable.encoding import EncodedVersion, encode
from pipegrid.core.mutable.geometry import SALT_BYTES, MutableGeometry
from pipegrid.core.mutable.keys import SigningKey, open_signing_key
from pipegrid.core.mutable.share import Part
from pipegrid.core.mutable.versions import Choice, Version, next_sequence_number
from pipegrid.core.placement import servers_of_happiness
from pipegrid.errors import (
    CapError,
    CorruptionError,
    NotEnoughSharesError,
    RollbackError,
    ServerError,
    UncoordinatedWriteError,
    UnhappyError,
    UsageError,
)
from pipegrid.reactor.together import together
from pipegrid.transfer.mutable.known import Known, KnownFiles
from pipegrid.transfer.mutable.mapping import HEAD_BYTES, ShareMap, is_settled, place
from pipegrid.transfer.mutable.publishing import Outcome, Places, Publication
from pipegrid.transfer.mutable.reading import read_whole
from pipegrid.transfer.mutable.slot import Slot
from pipegrid.transfer.mutable.surveying import Hints, Survey
from pipegrid.transfer.mutable.told import Told
from pipegrid.transfer.peers import Peer

Edit = Callable[[bytes], bytes]
"""From the old content to the new one; equal content is not written. It may be applied more than once."""

CAUTIOUS_S = 60.0
"""So long after others were met, writes have a leader from the start."""
REFUSAL_BYTES = 4000
"""Of each share, in the answer to a write: with small files a refused writer has all it needs in it."""


@attrs.frozen
class WriteResult:
    """
    A version that was written, and is the one that is there.

    Attributes:
        version: it.
        placed: share number to the nicknames of its servers.
        attempts: how often it was tried.
        reasons: what kept servers from taking shares, if anything did, by nickname.
        written: False if the content was as wanted already.
    """

    version: Version
    placed: dict[int, list[str]]
    attempts: int
    reasons: dict[str, str] = attrs.field(factory=dict)
    written: bool = True


@attrs.define
class _Base:
    """What the next version is made from, and where the shares are."""

    version: Version
    content: bytes | None
    heads: dict[Peer, dict[int, bytes]]
    highest: int
    is_warm: bool = False
    is_own: bool = False
    """It has the change already."""


class Modification:
    """
    One change of one file.

    Args:
        known: what is remembered of it.
        edit: see ``Edit``.
        replaces: the edit does not look at the old content, and must not hide somebody else's new one: if
            another writer is met, and has won, that is an error.
        always: write a new version even if the content is equal, or the state is unclear (repair).
        merge: makes one content of those of several versions with one number; None: the highest is taken.
        in_doubt: whether a part of the edit failed with the content that it was last given: then it is given
            what servers have, if that was only remembered.
        tried: versions that were written for the same edit and met others: no more than one's own that is
            unfinished, so what another one wrote goes before them.
        random: from 0 up to 1.

    Attributes:
        attempts: how often it was written.
    """

    def __init__(
        self,
        slot: Slot,
        files: KnownFiles,
        edit: Edit,
        usual: tuple[int, int],
        random: Callable[[], float],
        *,
        replaces: bool = False,
        always: bool = False,
        merge: Callable[[Sequence[bytes]], bytes] | None = None,
        in_doubt: Callable[[], bool] = lambda: False,
        tried: Iterable[Version] = (),
    ) -> None:
        if not slot.can_write:
            raise not_writable()
        self._slot = slot
        self._files = files
        self._known = files.of(slot.storage_index)
        self._edit = edit
        self._usual = usual
        self._random = random
        self._replaces = replaces
        self._always = always
        self._merge = merge
        self._in_doubt = in_doubt
        self._book = ShareBook(slot.cap, signing_key=self._known.signing_key)
        self._began_s = slot.clock.seconds()
        self._wait_s = 0.0
        # Versions that were tried, and their content, if it is known here.
        self._own: dict[Version, bytes | None] = dict.fromkeys(tried)
        self._last: _Base | None = None  # what the last try was made from
        self._told = Told()
        self._dirty = always or bool(self._own)
        self.attempts = 0
        self._asked_again = False
        self._looks: dict[Version, int] = {}

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
        base = self._warm_base() or await self._look(everyone=self._always)
        while True:
            try:
                content = self._apply(base)
            except Exception:
                if not base.is_warm:
                    raise
                content = None
            if base.is_warm and (content is None or self._in_doubt()):
                # It fails, or changes nothing, so that no server would test what is remembered.
                base = await self._look(everyone=False)
                continue
            if content is None:
                return self._unchanged(base)
            outcome, encoded = await self._publish(base, content)
            if outcome.is_clean:
                return self._done(encoded, content, outcome, base)
            self._told.written(outcome, encoded.version, base.version, self._own)
            if not outcome.placed and base.is_warm:
                # What was remembered is old: the answers tell what is there, and nothing was touched.
                self._known.forget_version()
                base = await self._base_of_answers(outcome) or await self._look(everyone=False)
                continue
            self._known.forget_version()
            self._known.contended_s = self._slot.clock.seconds()
            self._dirty = True
            self._own[encoded.version] = content
            self._last = base
            await self._wait(encoded.version)
            base = await self._look(everyone=True)
            self._check_won(base, encoded.version)

    async def look_ahead(self) -> None:
        """
        Find out what a change needs to know and remember it, so that the next one is written at once.

        Nothing is written. What is found is remembered only if all is in order; the next change looks again
        if not, and if somebody else has written meanwhile.

        Raises:
            NotEnoughSharesError, RollbackError, CorruptionError, UncoordinatedWriteError: as ``run``.
        """
        if self._warm_base() is None:
            remember_base(self._files, self._slot, await self._look(everyone=False))

    # Where it starts.

    def _warm_base(self) -> _Base | None:
        """Return what is remembered, if that is enough to write at once."""
        known = self._known
        self._open_remembered_key()
        if self._always or known.version is None or known.signing_key is None:
            return None
        if known.content is None and not self._replaces:
            return None
        if known.version.sequence_number < known.sequence_number:
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
        self._book.trust(known.version)
        return _Base(known.version, known.content, heads, known.sequence_number, is_warm=True)

    def _open_remembered_key(self) -> None:
        known = self._known
        if known.signing_key is None and known.encrypted_key:
            try:
                known.signing_key = open_signing_key(known.encrypted_key, self._slot.cap, 0)
            except CorruptionError:
                known.encrypted_key = b""
        if known.signing_key is not None and self._book.signing_key is None:
            self._book = ShareBook(self._slot.cap, signing_key=known.signing_key)

    def _hints(self) -> Hints:
        by_id = {peer.identity.server_id: peer for peer in self._slot.peers}
        return {
            by_id[server]: frozenset(numbers)
            for server, numbers in self._known.copies.items()
            if server in by_id
        }

    # Looking.

    async def _look(self, everyone: bool) -> _Base:
        """Ask servers until it is clear what to build on."""
        while True:
            survey = Survey(
                self._slot,
                self._book,
                self._slot.settings.write_read_bytes,
                self._hints(),
                self._usual,
            )
            wanted = quorum(self._slot, self._usual[1])
            if everyone:
                found = await survey.everyone(wanted)
            else:
                found = await survey.for_writer(self._known.newest, wanted)
            base = await self._base_of(found)
            if base is not None:
                return base
            await self._wait(None)
            everyone = True

    async def _base_of(self, found: ShareMap) -> _Base | None:
        """Return what to build on, or None if it has to be looked again."""
        choice = found.choice()
        unfinished = [v for v in choice.newer_unrecoverable if v not in self._own]
        if choice.best is None:
            base = self._base_in_memory(found, choice)
            if base is not None:
                return base
            if not unfinished:
                raise self._nothing_found(found)
        if unfinished:
            newest = unfinished[0]
            self._looks[newest] = self._looks.get(newest, 0) + 1
            if self._looks[newest] <= self._slot.settings.unfinished_looks:
                return None
        if choice.best is None:
            raise self._nothing_found(found)
        if self._is_too_few(found, choice.best):
            return None
        self._check_rollback(choice.best)
        heads = [choice.best, *choice.rivals]
        version = choice.best
        if not self._replaces:
            version = next((v for v in heads if v not in self._own), version)
        wanted = heads if self._merge is not None else [version]
        opening: Deferred[Any] = Deferred.fromCoroutine(self._open_key(found, version))
        reading: list[Deferred[Any]] = [
            Deferred.fromCoroutine(self._content(found, each)) for each in wanted
        ]
        self._known.signing_key, *contents = await together([opening, *reading])
        content = contents[0]
        if len(contents) > 1 and self._merge is not None:
            self._dirty = True
            content = self._merge(contents)
        if len(heads) > 1 or unfinished:
            self._dirty = True
        own = len(contents) == 1 and self._own.get(version) is not None
        highest = choice.highest_sequence_number
        shares = self._told.fill_in(found)
        if shares.keys() - found.copies.keys():
            highest = max([highest, *(v.sequence_number for v in self._own)])
        return _Base(version, content, shares, highest, is_own=own)

    def _is_too_few(self, found: ShareMap, version: Version) -> bool:
        """Return whether to ask once more, since connections may have been dead that are made anew now."""
        if found.answered < quorum(self._slot, version.total_shares) and not self._asked_again:
            self._asked_again = True
            return True
        check_quorum(self._slot, found, version)
        return False

    async def _content(self, found: ShareMap, version: Version) -> bytes | None:
        own = self._own.get(version)
        if own is not None:
            return own
        if self._replaces and not self._always:
            return None
        known = self._known
        if known.version == version and known.content is not None:
            return known.content
        self._check_size(version.size)
        return await read_whole(self._slot, found, version)

    def _check_size(self, size: int) -> None:
        most = self._slot.settings.max_content_bytes
        if size > most:
            raise UsageError(
                f"this mutable file would have {size} bytes, and {most} are the most that can be written as "
                "a whole; store it as immutable files, or change an MDMF file in part"
            )

    def _base_in_memory(self, found: ShareMap, choice: Choice) -> _Base | None:
        """
        Return the last try's base if it was the last version that could be read.

        No version is there with a number that needs a later one to have been made from. And none that
        others hold can have been made from a later one either: it would be among those that are there.
        """
        last = self._last
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

    def _nothing_found(self, found: ShareMap) -> NotEnoughSharesError:
        choice = found.choice()
        versions = choice.unrecoverable
        if not versions:
            why = (
                f"{len(found.failed)} servers did not answer" if found.failed else "nobody has any"
            )
            return NotEnoughSharesError(
                f"no share of this mutable file was found: {why}; check the cap, and that the servers can be "
                "reached",
                0,
                self._usual[0],
            )
        most = max(versions, key=lambda v: len(choice.shares[v]))
        have = len(choice.shares[most])
        return NotEnoughSharesError(
            f"no version of this mutable file can be read: of {len(versions)} that were found the best has "
            f"{have} of the {most.required_shares} shares that are needed; try again when more servers can "
            "be reached",
            have,
            most.required_shares,
        )

    def _check_rollback(self, best: Version) -> None:
        if self._always or self._replaces:
            return  # what is written is above everything that was seen, in any case
        if best.sequence_number < self._known.sequence_number:
            raise rollback(best, self._known)

    async def _open_key(self, found: ShareMap, version: Version) -> SigningKey:
        """Return the signing key, from whatever share has it."""
        if self._book.signing_key is not None:
            return self._book.signing_key
        problem: Exception | None = None
        for copies in found.holders(version).values():
            for copy in copies:
                share = copy.share
                assert share is not None
                try:
                    for start, end in share.missing(Part.PRIVATE_KEY):
                        data = await self._slot.read(copy.peer, copy.number, start, end - start)
                        share.answered(start, end - start, data)
                    key = self._book.open_signing_key(share)
                except (CorruptionError, ServerError) as error:
                    problem = error
                    continue
                if key is not None:
                    return key
        raise problem or NotEnoughSharesError("no share has the private key", 0, 1)

    async def _base_of_answers(self, outcome: Outcome) -> _Base | None:
        """Return what to build on from the answers to a refused write, if they tell enough."""
        found = ShareMap(self._book)
        for peer, seen in outcome.seen.items():
            found.heard(peer, seen, REFUSAL_BYTES)
        for peer, error in outcome.failed.items():
            found.failed_to_answer(peer, error)
        wanted = quorum(self._slot, self._usual[1])
        if not is_settled(found, wanted, self._known.newest):
            return None
        return await self._base_of(found)

    # Applying.

    def _apply(self, base: _Base) -> bytes | None:
        """Return the new content, or None if there is nothing to write."""
        old = base.content
        if self._replaces:
            content = self._edit(b"" if old is None else old)
        elif base.is_own:
            assert old is not None
            content = old
        else:
            assert old is not None, "an edit needs the old content"
            content = self._edit(old)
            if content == old and not self._dirty:
                return None
        self._check_size(len(content))
        return content

    def _unchanged(self, base: _Base) -> WriteResult:
        self._known.saw(base.version)
        placed: dict[int, list[str]] = {}
        for peer, shares in base.heads.items():
            for number in shares:
                placed.setdefault(number, []).append(peer.name)
        return WriteResult(base.version, placed, self.attempts, written=False)

    # Writing.

    async def _publish(self, base: _Base, content: bytes) -> tuple[Outcome, EncodedVersion]:
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
        places: Places = place(
            geometry.total_shares, base.heads, self._slot.peers, set(self._slot.wrong_enabler)
        )
        self.attempts += 1
        self._book.trust(encoded.version)
        publication = Publication(
            self._slot, encoded, places, base.heads, read_bytes=REFUSAL_BYTES if base.is_warm else 0
        )
        return await publication.run(self._leader(places)), encoded

    def _leader(self, places: Places) -> Peer | None:
        """Return the server to be written first, if others may be writing."""
        met_s = self._known.contended_s
        if met_s is None or self._slot.clock.seconds() - met_s > CAUTIOUS_S:
            return None
        holders = (
            peer
            for peer in self._slot.peers
            if any(head is not None for head in places.get(peer, {}).values())
        )
        return next(holders, None)

    def _done(
        self, encoded: EncodedVersion, content: bytes, outcome: Outcome, base: _Base
    ) -> WriteResult:
        version = encoded.version
        remember(self._files, self._slot, encoded, content, outcome, base.heads)
        check_happy(self._slot, version, outcome)
        return write_result(version, outcome, self.attempts)

    # Others.

    async def _wait(self, tried: Version | None) -> None:
        """Wait a random time, longer each time; give up when patience ends."""
        clock, settings = self._slot.clock, self._slot.settings
        elapsed_s = clock.seconds() - self._began_s
        if elapsed_s > settings.patience_s:
            raise UncoordinatedWriteError(
                f"others have been changing this mutable file for {elapsed_s:.0f} s, and no version of it "
                "came to rest; try again later",
                None,
                None if tried is None else tried.sequence_number,
            )
        self._wait_s = min(max(2 * self._wait_s, settings.first_wait_s, 0.0), settings.max_wait_s)
        await deferLater(clock, self._wait_s * self._random())

    def _check_won(self, base: _Base, tried: Version) -> None:
        """
        Raise UncoordinatedWriteError if this replaces the content, and another one has won.
        """
        if not self._replaces or self._always or base.version in self._own:
            return
        if base.version.sequence_number >= tried.sequence_number:
            raise UncoordinatedWriteError(
                "somebody else wrote this mutable file at the same time, and version "
                f"{base.version.name} is there now; what you wanted to write is not: read what is "
                "there, and write again if you still want to",
                base.version.sequence_number,
                tried.sequence_number,
            )


def remember_base(files: KnownFiles, slot: Slot, base: _Base) -> None:
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


def not_writable() -> CapError:
    """Return the error for a cap that cannot write."""
    return CapError(
        "this cap does not write a mutable file; use its write cap, which begins with URI:SSK: or URI:MDMF:"
    )


def rollback(best: Version, known: Known) -> RollbackError:
    """Return the error for an older version than was seen before."""
    return RollbackError(
        f"the servers offer version {best.sequence_number} of this mutable file, although version "
        f"{known.sequence_number} was seen before: the newer one was lost, its servers cannot be reached, or "
        "somebody goes back on purpose; try again with more servers, or accept the older version",
        best.sequence_number,
        known.sequence_number,
    )


def quorum(slot: Slot, total_shares: int) -> int:
    """Return how many servers have to take shares of a version, and so to be asked before."""
    return min(slot.settings.happy, total_shares, len(slot.peers))


def check_quorum(slot: Slot, found: ShareMap, version: Version) -> None:
    """Raise UnhappyError if so few servers have answered that no write can reach enough of them."""
    wanted = quorum(slot, version.total_shares)
    if found.answered < wanted:
        reasons = "; ".join(sorted({str(error) for error in found.failed.values()}))
        raise UnhappyError(
            f"only {found.answered} servers have answered, and {wanted} have to take shares of this mutable "
            f"file; nothing was written{': ' + reasons if reasons else ''}; try again when more servers can "
            "be reached",
            found.answered,
            wanted,
        )


def is_happy(slot: Slot, version: Version, outcome: Outcome) -> bool:
    """Return whether enough servers took shares, and enough of them."""
    reached = servers_of_happiness({number: set(peers) for number, peers in outcome.placed.items()})
    wanted = quorum(slot, version.total_shares)
    return reached >= wanted and len(outcome.placed) >= version.required_shares


def check_happy(slot: Slot, version: Version, outcome: Outcome) -> None:
    """Raise UnhappyError if the shares were not taken by enough servers, or there are too few of them."""
    if not is_happy(slot, version, outcome):
        wanted = quorum(slot, version.total_shares)
        placed = {number: set(peers) for number, peers in outcome.placed.items()}
        reached = servers_of_happiness(placed)
        reasons = "; ".join(sorted({str(error) for error in outcome.failed.values()}))
        raise UnhappyError(
            f"version {version.name} of this mutable file has reached only {reached} servers of happiness, "
            f"and {wanted} are wanted{': ' + reasons if reasons else ''}; try again when more servers can be "
            "reached",
            reached,
            wanted,
        )


def write_result(version: Version, outcome: Outcome, attempts: int) -> WriteResult:
    """Return what to tell of a version that was written."""
    placed = {
        number: sorted(peer.name for peer in peers)
        for number, peers in sorted(outcome.placed.items())
    }
    reasons = {peer.name: str(error) for peer, error in outcome.failed.items()}
    return WriteResult(version, placed, attempts, reasons)


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
    known.saw(version)
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
