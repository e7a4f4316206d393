"""Publish one version: write its shares, and compute the quorum, happiness and result of the write."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from pipegrid.core.caps import MutableCap
from pipegrid.core.hashes import Buffer
from pipegrid.core.mutable.encoder import EncodedVersion
from pipegrid.core.mutable.versions import Version
from pipegrid.core.placement import possible_happiness, servers_of_happiness
from pipegrid.core.text import counted
from pipegrid.errors import (
    NoSpace,
    ServerError,
    ServerRefused,
    ServerTimeout,
    UnhappyError,
    WrongSecret,
    is_absence,
)
from pipegrid.reactor.deferreds import RequestSet
from pipegrid.transfer.failure_messages import joined_once
from pipegrid.transfer.mutable.servermap import HEAD_BYTES, ServerMap, server_for_share
from pipegrid.transfer.mutable.slot_client import Slot, quorum
from pipegrid.transfer.peers import Peer, server_ids
from pipegrid.wire.storage_messages import ShareChange

# Writing the shares of one version: each to its server, if the server has exactly the shares that the writer
# expects.
#
# One read-test-write per server contains all of its shares: the server writes all of them or none. The
# outcome follows from the responses alone:
#
# * written: the tests passed; or they failed because this very version is there, so that the request was
#   carried out before its response was lost;
# * conflict: another client's version is there, in place of an expected share or in addition; if the request
#   was sent twice, that version may derive from this one;
# * failed: the server did not respond, or refused. Its shares go to other servers.
#
# **With a leader**, which writers use after a conflict: the leader is written first, and the other servers
# only if the leader accepted. A writer whom the leader refuses has changed no other server; so one of many
# writers succeeds, and no version is left half overwritten.
#
# Source: Tahoe-LAFS's ``mutable.rst``, and how 1.20 behaves.

ExpectedHeads = dict[Peer, dict[int, bytes | None]]
"""Maps a server and share number to the share's required first bytes; None: the share must not exist."""

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum number of bytes of share data in one request; more data for a server takes several requests."""

JOINED_PIECES = 4
"""A write of more pieces than this is joined into one piece, since servers limit the pieces in a request."""


class PublishOutcome:
    """
    The outcome of writing a version.

    Attributes:
        placed: maps a share number to the servers that have the share now.
        refused: servers that had other shares than expected.
        unclear: those of ``refused`` that got the request twice, and may have carried out the first.
        surprises: servers that accepted the shares, but have other shares that were not known.
        failed: the servers that did not respond, or responded with an error; maps each to its error.
        seen: the servers that responded; maps each to the first bytes of all its shares before the write.
    """

    __slots__ = ("failed", "placed", "refused", "seen", "surprises", "unclear")

    def __init__(
        self,
    ) -> None:
        self.placed: dict[int, set[Peer]] = {}
        self.refused: list[Peer] = []
        self.unclear: list[Peer] = []
        self.surprises: list[Peer] = []
        self.failed: dict[Peer, ServerError] = {}
        self.seen: dict[Peer, dict[int, bytes]] = {}

    @property
    def is_clean(self) -> bool:
        """Whether there was no conflict with another client's write."""
        return not self.refused and not self.surprises

    @property
    def may_be_stored(self) -> bool:
        """Whether some server may have stored the version."""
        # A server that did not respond may have stored the version.
        return bool(self.placed or self.failed or self.unclear)


class Publish:
    """
    Writes one version, once.

    Args:
        places: see ``servermap.place``.
        heads: the first bytes of each known share, including shares that are not written.
        may_move: whether the shares of a server that fails are sent to other servers; must be False if only
            parts of shares are written.
        read_bytes: number of bytes of each share to return in the responses.
        is_new: whether the file is new, so that no other client can have shares of it; a server that claims
            to have some has failed.
    """

    def __init__(
        self,
        slot: Slot,
        encoded: EncodedVersion,
        places: ExpectedHeads,
        heads: Mapping[Peer, Mapping[int, bytes]],
        may_move: bool = True,
        read_bytes: int = HEAD_BYTES,
        is_new: bool = False,
    ) -> None:
        self.outcome = PublishOutcome()
        self._slot = slot
        self._encoded = encoded
        self._head = encoded.version.signed_prefix[:HEAD_BYTES]
        self._places = {peer: dict(shares) for peer, shares in places.items()}
        self._heads = heads
        self._may_move = may_move
        self._is_new = is_new
        self._read_bytes = max(HEAD_BYTES, read_bytes)
        self._requests: RequestSet[Peer] = RequestSet(slot.clock)

    async def run(self, leader: Peer | None = None) -> PublishOutcome:
        """
        Write, and wait for the responses; wait for stragglers at most until the grace is over.

        Args:
            leader: the server that is written first; if it refuses, no other server is written.
        """
        # Use a copy of ``_places``: while the leader is awaited, shares of failed servers move to other
        # servers in ``_places`` and are sent at once; they must not be sent again.
        first = {peer: dict(shares) for peer, shares in self._places.items()}
        try:
            if leader is not None and leader in first:
                self._start(leader, first.pop(leader))
                await self._wait()
                if not self.outcome.is_clean:
                    return self.outcome
            for peer, shares in first.items():
                self._start(peer, shares)
            await self._wait()
            return self.outcome
        finally:
            self._requests.cancel()

    async def _wait(self) -> None:
        clock, settings = self._slot.clock, self._slot.settings
        began_s = clock.seconds()
        grace_ends_s: float | None = None
        while self._requests.running:
            if grace_ends_s is None and self._may_end():
                grace_ends_s = clock.seconds() + settings.grace(clock.seconds() - began_s)
            timeout_s = None if grace_ends_s is None else grace_ends_s - clock.seconds()
            if timeout_s is not None and timeout_s <= 0:
                self._give_up_stragglers()
                return
            await self._requests.wait(timeout_s)

    def _may_end(self) -> bool:
        """Return whether the outcome, success or conflict, is clear without the outstanding responses."""
        if not self.outcome.is_clean:
            return True
        placed, version = self.outcome.placed, self._encoded.version
        # This many shares suffice to read the version, and leave fewer than k shares for any other version.
        enough = max(version.required_shares, version.total_shares - version.required_shares + 1)
        if len(placed) < min(enough, len(self._encoded.writes)):
            return False
        return servers_of_happiness(placed) >= quorum(self._slot, version.total_shares)

    def _give_up_stragglers(self) -> None:
        for peer in self._requests.running.values():
            self.outcome.failed[peer] = ServerTimeout(
                f"{peer.name} was much slower than the others", peer.name, True
            )
        self._requests.cancel()

    def _start(self, peer: Peer, shares: Mapping[int, bytes | None]) -> None:
        batch: dict[int, bytes | None] = {}
        size = 0
        for number, head in shares.items():
            length = sum(write.length for write in self._encoded.writes[number])
            if batch and size + length > MAX_MESSAGE_BYTES:
                self._requests.start(self._write(peer, batch), peer)
                batch, size = {}, 0
            batch[number] = head
            size += length
        if batch:
            self._requests.start(self._write(peer, batch), peer)

    async def _write(self, peer: Peer, shares: Mapping[int, bytes | None]) -> None:
        changes = {number: self._change(number, head) for number, head in shares.items()}
        try:
            result = await self._slot.change(peer, changes, self._read_bytes)
        except ServerError as error:
            self._failed(peer, shares, error)
            return
        seen = {number: pieces[0] for number, pieces in result.data.items()}
        self.outcome.seen.setdefault(peer, seen)
        ours = all(seen.get(number, b"")[:HEAD_BYTES] == self._head for number in shares)
        refused = not result.success and not ours
        if self._is_new and (refused or self._is_surprised(peer, shares, seen)):
            claims = f"{peer.name} claims to have shares of a mutable file that was only just made"
            self._failed(peer, shares, ServerError(claims, peer.name))
            return
        if refused:
            self.outcome.refused.append(peer)
            if result.repeated:
                self.outcome.unclear.append(peer)
            return
        for number in shares:
            self.outcome.placed.setdefault(number, set()).add(peer)
        if self._is_surprised(peer, shares, seen):
            self.outcome.surprises.append(peer)

    def _failed(self, peer: Peer, shares: Mapping[int, bytes | None], error: ServerError) -> None:
        self.outcome.failed[peer] = error
        if self._may_move:
            self._move(shares)

    def _is_surprised(
        self, peer: Peer, shares: Mapping[int, bytes | None], seen: Mapping[int, bytes]
    ) -> bool:
        """Return whether a server has shares that were not known and not written."""
        expected = {n: head[:HEAD_BYTES] for n, head in self._heads.get(peer, {}).items()}
        return any(
            number not in shares and data[:HEAD_BYTES] not in (expected.get(number), self._head)
            for number, data in seen.items()
        )

    def _change(self, number: int, head: bytes | None) -> ShareChange:
        test = (0, 1, b"") if head is None else (0, max(HEAD_BYTES, len(head)), head)
        writes: list[tuple[int, Buffer]] = []
        for write in self._encoded.writes[number]:
            pieces = write.pieces
            if len(pieces) > JOINED_PIECES:
                pieces = (b"".join(pieces),)
            offset = write.offset
            for piece in pieces:
                writes.append((offset, piece))
                offset += len(piece)
        return ShareChange((test,), tuple(writes), self._encoded.share_bytes)

    def _move(self, shares: Mapping[int, bytes | None]) -> None:
        """Send the shares of a failed server to others, unless everything must be written again anyway."""
        if not self.outcome.is_clean:
            return
        for number in shares:
            if number in self.outcome.placed:
                continue
            peer = server_for_share(
                number, self._places, self._heads, self._slot.peers, set(self.outcome.failed)
            )
            if peer is not None:
                self._places.setdefault(peer, {})[number] = None
                self._requests.start(self._write(peer, {number: None}), peer)


# The result of writing a mutable file.


@attrs.frozen
class WriteResult:
    """
    A version that was written and is the current one.

    Attributes:
        placed: maps a share number to the nicknames of its servers.
        placed_ids: maps a share number to the ids of its servers.
        attempts: number of writes.
        reasons: maps a server's nickname to the reason why it did not accept shares.
        written: False if the file already had this content.
        happiness: servers of happiness reached; 0 if nothing was written.
        possible_happiness: servers of happiness that can be reached with all servers that did not fail.
    """

    version: Version
    placed: dict[int, list[str]]
    attempts: int
    reasons: dict[str, str] = attrs.field(factory=dict)
    written: bool = True
    happiness: int = 0
    possible_happiness: int = 0
    placed_ids: dict[int, list[str]] = attrs.field(factory=dict)


def write_result(
    slot: Slot, version: Version, outcome: PublishOutcome, attempts: int
) -> WriteResult:
    """Return the result of a write, and count the write if it reached too few servers."""
    placed = {
        number: sorted(peer.name for peer in peers)
        for number, peers in sorted(outcome.placed.items())
    }
    reasons = {peer.name: str(error) for peer, error in outcome.failed.items()}
    takers = [peer for peer in slot.peers if peer.takes_uploads]
    able = [peer for peer in takers if peer not in outcome.failed]
    n = version.total_shares
    reached = servers_of_happiness(outcome.placed)
    if slot.shortfall is not None:
        slot.shortfall.note(reached, min(n, len(takers)), reasons)
    return WriteResult(
        version,
        placed,
        attempts,
        reasons,
        happiness=reached,
        possible_happiness=possible_happiness(outcome.placed, able, n),
        placed_ids={n: server_ids(peers) for n, peers in sorted(outcome.placed.items())},
    )


@attrs.frozen
class CreateResult:
    """
    A new mutable file.

    Attributes:
        cap: its write cap.
        written: the result of the first write.
    """

    cap: MutableCap
    written: WriteResult


# How many servers must respond, and accept shares, before a write of a mutable file is acknowledged.


def check_quorum(slot: Slot, found: ServerMap, version: Version) -> None:
    """
    Raise UnhappyError if fewer servers have responded than must accept shares before a write is acknowledged.
    """
    wanted = quorum(slot, version.total_shares)
    if found.answered < wanted:
        few = counted(found.answered, "server has", "servers have")
        raise UnhappyError(
            f"only {few} answered, and {wanted} have to take shares of this mutable "
            f"file; nothing was written{_because(found.failed)}; try again when more servers can "
            "be reached",
            found.answered,
            wanted,
        )


def check_happy(slot: Slot, version: Version, outcome: PublishOutcome) -> None:
    """Raise UnhappyError if too few servers accepted shares, or too few shares were accepted."""
    reached = servers_of_happiness(outcome.placed)
    wanted = quorum(slot, version.total_shares)
    if reached >= wanted and len(outcome.placed) >= version.required_shares:
        return
    few = counted(reached, "server")
    failed = {**slot.wrong_enabler, **outcome.failed}
    for peer in slot.peers:
        if (reason := peer.no_uploads()) is not None:
            failed.setdefault(peer, ServerRefused(reason))
    raise UnhappyError(
        f"version {version.name} of this mutable file has reached only {few} of happiness, "
        f"and {wanted} are wanted{_because(failed)}; {_advice(failed)}",
        reached,
        wanted,
        sum(is_absence(error) for error in failed.values()),
    )


def _advice(failed: Mapping[Peer, ServerError]) -> str:
    if any(isinstance(error, NoSpace) for error in failed.values()):
        return "free space there, or add servers"
    if any(isinstance(error, WrongSecret) for error in failed.values()):
        return (
            "such a file was copied there from another server, or made by another client: repair it from "
            "another client, or delete it there"
        )
    return "try again when more servers can be reached"


def _because(failed: Mapping[Peer, ServerError]) -> str:
    reasons = joined_once({peer.name: str(error) for peer, error in failed.items()})
    return f": {reasons}" if reasons else ""
