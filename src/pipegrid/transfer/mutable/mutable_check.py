"""
Checking a mutable file; every server is asked, since any may have a version that the others do not have.
"""

from __future__ import annotations

from functools import partial

import attrs

from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable.decoder import VersionReader
from pipegrid.core.mutable.keys import load_verifying_key, open_signing_key
from pipegrid.core.mutable.mutable_share import Part, VerifiedVersions, check_signed
from pipegrid.core.mutable.versions import Choice, Version
from pipegrid.core.placement import possible_happiness, servers_of_happiness
from pipegrid.errors import CorruptionError, NoSuchShare, ServerError, UncoordinatedWriteError
from pipegrid.reactor.deferreds import few_at_a_time
from pipegrid.transfer.mutable.mutable_failure_messages import rollback
from pipegrid.transfer.mutable.publish import WriteResult
from pipegrid.transfer.mutable.servermap import Copy, ServerMap, ServermapUpdate
from pipegrid.transfer.mutable.slot_client import Slot
from pipegrid.transfer.mutable.version_cache import CachedVersion
from pipegrid.transfer.peers import Peer, server_ids
from pipegrid.transfer.results import CheckResult, RepairResult
from pipegrid.transfer.server_space import Capacity

SHARES_AT_ONCE = 8
SEGMENTS_AT_ONCE = 64
"""Number of segments per share that are verified at once: 3 MB for MDMF segments of 128 KiB at 3-of-10."""
LEASES_AT_ONCE = 100
LOOKS = 3
"""Maximum number of queries for a file that changes while it is checked."""

_NEWER = (
    "there are shares of a newer version of this mutable file, but too few to read it; try again later, "
    "when their servers may be back, or give that version up: repair it with force ('pipegrid repair -f')"
)
_RIVALS = (
    "two versions of this mutable file with the same number can be read, and a repair keeps one: repair it "
    "with force ('pipegrid repair -f') if that does not matter"
)


@attrs.frozen
class MutableCheckResult(CheckResult):
    """
    The health of one mutable file; all counts of shares refer to the best version that can be read.

    The file is healthy if that version is the only one, each of its shares has a good copy, and the shares
    are on as many servers as can have them now.

    Attributes:
        version: the best version that can be read, or None.
        other_versions: sequence number and number of distinct shares of each other version, the newest first.
        newer_unrecoverable: whether the newest version has too few shares, because its write was not finished
            or its servers cannot be reached.
        rivals: whether other versions with the same number can be read, as after two uncoordinated writes.
        seen: the sequence number of a version that was seen before and is newer than all present versions; 0:
            none.
        recoverable_versions, unrecoverable_versions: number of versions that can be read, and that cannot.
        other_holders: for each share of another version: the version, the share number, and the ids of the
            share's servers.
    """

    version: Version | None = None
    other_versions: list[tuple[int, int]] = attrs.field(factory=list)
    newer_unrecoverable: bool = False
    rivals: bool = False
    seen: int = 0
    recoverable_versions: int = 0
    unrecoverable_versions: int = 0
    other_holders: list[tuple[Version, int, list[str]]] = attrs.field(factory=list)


class MutableCheck:
    """
    The check of one mutable file.

    Without ``verify`` the signature of each version is checked, and shares are counted. With ``verify``,
    every byte of the best version's shares is also read and proven.

    A file that changes during the check is not reported as damaged: the beginning of a share that seems
    damaged is read again, and if the share belongs to another version now, the whole query is repeated.

    Args:
        cap: the cap that the caller gave.
        verify: read every share, and prove every byte.
        add_lease: add or renew this client's leases on servers with shares.
        capacity: what servers have reported of their space.
    """

    def __init__(
        self,
        slot: Slot,
        cap: MutableCap,
        usual: tuple[int, int],
        verify: bool = False,
        add_lease: bool = False,
        capacity: Capacity | None = None,
    ) -> None:
        self._slot = slot
        self._cap = cap
        self._usual = usual
        self._verify = verify
        self._add_lease = add_lease
        self._capacity = capacity or Capacity(slot.clock)
        self._bad: set[tuple[str, int]] = set()
        self._changed = False  # whether a share has changed to another version
        self._corrupt: list[CorruptionError] = []
        self._spoilt: list[Version] = []  # damaged versions that are newer than the best one
        self._good: dict[int, list[Copy]] = {}  # good copies of the best version, by share number
        self._takers: list[Peer] = []  # servers that responded and seem to accept shares

    async def run(self) -> MutableCheckResult:
        """Ask every server, verify shares and add leases as wanted, and return the result."""
        for _ in range(LOOKS):
            found = await self._look()
            if not self._changed:
                break
        await self._note_good(found)
        result = self._judge(found)
        return await self._leased(found, result) if self._add_lease else result

    async def _look(self) -> ServerMap:
        self._changed = False
        self._bad.clear()
        self._spoilt.clear()
        book = VerifiedVersions(self._slot.cap)
        survey = ServermapUpdate(self._slot, book, self._slot.settings.read_bytes, {}, self._usual)
        # A slow server must not be counted as having no share: all get the full time limit for silence.
        found = await survey.everyone(len(self._slot.peers))
        self._corrupt = list(found.corrupt)
        return await self._verified(found) if self._verify else found

    async def _verified(self, found: ServerMap) -> ServerMap:
        """Verify the best version's shares; if too few of them are good, continue with an older version."""
        while (best := found.choice().best) is not None:
            copies = [copy for held in found.holders(best).values() for copy in held]
            await few_at_a_time(
                SHARES_AT_ONCE, [partial(self._verify_copy, copy, best) for copy in copies]
            )
            bad = [copy for copy in copies if self._is_bad(copy)]
            good = {copy.number for copy in copies} - {copy.number for copy in bad}
            older = found.without(bad)
            if len(good) >= best.required_shares or older.choice().best in (None, best):
                break
            self._spoilt.append(best)
            found = older
        return found

    def _is_bad(self, copy: Copy) -> bool:
        return (copy.peer.identity.server_id, copy.number) in self._bad

    async def _verify_copy(self, copy: Copy, version: Version) -> None:
        try:
            problems = await self._problems(copy, version)
        except NoSuchShare:
            problems = []
        except ServerError as error:
            what = f"share {copy.number} cannot be read: {error}"
            problems = [CorruptionError(what, copy.number)]
        else:
            if not problems:
                return
            if await self._slot.has_changed(copy.peer, copy.number, version):
                self._changed = True
                problems = []
        for problem in problems:
            problem.server = copy.peer.name
        self._corrupt += problems
        self._bad.add((copy.peer.identity.server_id, copy.number))

    async def _problems(self, copy: Copy, version: Version) -> list[CorruptionError]:
        """
        Read all missing parts of a share, and return the damage that was found.

        Raises:
            ServerError: the share cannot be read.
        """
        assert copy.share is not None
        reader = VersionReader(version, None)
        reader.add_share(copy.share)
        segments = version.geometry.num_segments
        try:
            for first in range(0, max(1, segments), SEGMENTS_AT_ONCE):
                end = min(first + SEGMENTS_AT_ONCE, segments)
                while gaps := reader.missing(copy.number, first, end):
                    for start, stop in gaps:
                        data = await self._slot.read(copy.peer, copy.number, start, stop - start)
                        copy.share.answered(start, stop - start, data)
                for segment in range(first, end):
                    block = reader.block(copy.number, segment)
                    if block is not None and not block.is_good():
                        reader.condemn_block(copy.number, segment)
                    reader.release(segment)
                # The header of a damaged share may claim a length of 2^60 bytes.
                if not reader.shares_in_use:
                    break
            reader.prove_share(copy.number)
            await self._verify_keys(copy, version)
        except CorruptionError as error:
            return [*reader.corrupt, error]
        return reader.corrupt

    async def _verify_keys(self, copy: Copy, version: Version) -> None:
        """
        Verify the share's public key and signature, which readers may have taken from another share; with a
        write cap, verify the private key too.

        Raises:
            CorruptionError: a key or the signature is damaged.
        """
        share, cap = copy.share, self._slot.cap
        assert share is not None
        parts = [Part.PUBLIC_KEY, Part.SIGNATURE]
        if self._slot.can_write:
            parts.append(Part.PRIVATE_KEY)
        while gaps := share.missing(*parts):
            for start, stop in gaps:
                data = await self._slot.read(copy.peer, copy.number, start, stop - start)
                share.answered(start, stop - start, data)
        key = load_verifying_key(share.read(Part.PUBLIC_KEY), cap, copy.number)
        check_signed(share, version, key)
        if self._slot.can_write:
            open_signing_key(share.read(Part.PRIVATE_KEY), cap, copy.number)

    async def _note_good(self, found: ServerMap) -> None:
        """
        Record which copies are good and which servers accept shares; servers are asked for their space only
        if it matters.
        """
        best = found.choice().best
        for number, copies in found.holders(best).items() if best is not None else ():
            good = [copy for copy in copies if not self._is_bad(copy)]
            if good:
                self._good[number] = good
        refusing = self._slot.wrong_enabler
        self._takers = [
            peer
            for peer in self._slot.peers
            if peer in found.copies and peer not in refusing and peer.takes_uploads
        ]
        if best is None or len(self._good) < best.total_shares:
            return
        if servers_of_happiness(self._sharemap()) < self._possible(best.total_shares):
            silence_s = self._slot.settings.silence_s
            length = best.geometry.data_bytes
            full = await self._capacity.full(self._takers, length, silence_s, mutable=True)
            self._takers = [peer for peer in self._takers if peer not in full]

    def _sharemap(self) -> dict[int, set[Peer]]:
        return {number: {copy.peer for copy in copies} for number, copies in self._good.items()}

    def _possible(self, total_shares: int) -> int:
        return possible_happiness(self._sharemap(), self._takers, total_shares)

    def _judge(self, found: ServerMap) -> MutableCheckResult:
        choice = found.choice()
        best = choice.best
        good = {
            number: sorted(copy.peer.name for copy in copies)
            for number, copies in self._good.items()
        }
        reached = servers_of_happiness(self._sharemap())
        k, n = self._usual if best is None else (best.required_shares, best.total_shares)
        recoverable = best is not None and len(good) >= k
        others = [
            (version.sequence_number, len(choice.shares.get(version, ())))
            for version in sorted({*choice.shares, *self._spoilt}, reverse=True)
            if version != best
        ]
        return MutableCheckResult(
            cap=self._cap,
            version=best if recoverable else None,
            healthy=recoverable
            and len(good) == n
            and not others
            and not self._corrupt
            and reached >= self._possible(n),
            recoverable=recoverable,
            good_shares=good,
            happiness=reached,
            possible_happiness=self._possible(n),
            servers=len(self._slot.peers),
            other_versions=others,
            newer_unrecoverable=bool(choice.newer_unrecoverable or self._spoilt),
            rivals=bool(choice.rivals),
            required_shares=k,
            total_shares=n,
            corrupt=self._corrupt,
            unreachable=sorted(peer.name for peer in found.failed),
            remarks=[_NEWER] if self._spoilt else _remarks(choice),
            reasons={peer.name: str(error) for peer, error in found.failed.items()},
            share_servers={
                number: server_ids(copy.peer for copy in copies)
                for number, copies in self._good.items()
            },
            answered={peer.identity.server_id: peer.name for peer in found.copies},
            recoverable_versions=len(choice.recoverable),
            unrecoverable_versions=len({*choice.unrecoverable, *self._spoilt}),
            other_holders=[
                (version, number, server_ids(copy.peer for copy in copies))
                for version in choice.shares
                if version != best
                for number, copies in found.holders(version).items()
            ],
        )

    async def _leased(self, found: ServerMap, result: MutableCheckResult) -> MutableCheckResult:
        renewed: list[str] = []
        problems: list[str] = []

        async def add(peer: Peer) -> None:
            try:
                await self._slot.add_lease(peer)
                renewed.append(peer.name)
            except ServerError as error:
                problems.append(str(error))

        holders = [peer for peer, copies in found.copies.items() if copies]
        await few_at_a_time(LEASES_AT_ONCE, [partial(add, peer) for peer in holders])
        return attrs.evolve(result, renewed=sorted(renewed), lease_problems=sorted(set(problems)))


def _remarks(choice: Choice) -> list[str]:
    """Return remarks on versions other than the best one; the counts of shares do not cover these."""
    if choice.best is None or len(choice.shares) == 1:
        return []
    if choice.newer_unrecoverable:
        return [_NEWER]
    if choice.rivals:
        return [_RIVALS]
    return ["some servers have shares of older versions; 'pipegrid repair' makes all of them new"]


def held_against(known: CachedVersion, result: MutableCheckResult) -> MutableCheckResult:
    """
    Return the result; if all present versions are older than one seen before, mark the result as not healthy.
    """
    there = [number for number, _ in result.other_versions]
    if result.version is None:
        return result
    if known.sequence_number <= max([result.version.sequence_number, *there]):
        return result
    return attrs.evolve(
        result,
        healthy=False,
        seen=known.sequence_number,
        remarks=[*result.remarks, str(rollback(result.version, known))],
    )


def check_repairable(result: MutableCheckResult, known: CachedVersion) -> None:
    """
    Raise if a repair would have to choose between the writes of two clients.

    Such a repair would overwrite a newer version that cannot be read, or another version with the same
    number.

    Raises:
        RollbackError: a newer version was seen before.
        UncoordinatedWriteError: shares of a newer version exist, or another version has the same number.
    """
    if result.seen and result.version is not None:
        raise rollback(result.version, known)
    if result.newer_unrecoverable or result.rivals:
        why = _NEWER if result.newer_unrecoverable else _RIVALS
        raise UncoordinatedWriteError(why, result.other_versions[0][0])


def repaired(
    cap: MutableCap, before: MutableCheckResult, written: WriteResult, elapsed_s: float
) -> RepairResult:
    placed = written.placed
    after = attrs.evolve(
        before,
        version=written.version,
        good_shares=placed,
        share_servers=written.placed_ids,
        recoverable_versions=1,
        unrecoverable_versions=0,
        other_holders=[],
        healthy=len(placed) == written.version.total_shares
        and written.happiness >= written.possible_happiness
        and not written.reasons,
        recoverable=True,
        happiness=written.happiness,
        possible_happiness=written.possible_happiness,
        other_versions=[],
        newer_unrecoverable=False,
        rivals=False,
        seen=0,
        remarks=[],
        corrupt=[],
    )
    return RepairResult(
        cap,
        before,
        after,
        {number: names[0] for number, names in placed.items()},
        [],
        sorted(set(written.reasons.values())),
        elapsed_s,
        written.reasons,
    )
