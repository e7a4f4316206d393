"""
Reading a version whose shares are known: k shares are read in advance, in pieces, all requested at the same
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.defer import Deferred

from pipegrid.core.hashes import Buffer
from pipegrid.core.mutable.decoder import VersionReader
from pipegrid.core.mutable.mutable_share import MutableShare
from pipegrid.core.mutable.versions import Version
from pipegrid.core.spans import Spans
from pipegrid.core.text import counted
from pipegrid.errors import CorruptionError, NotEnoughSharesError, ServerError
from pipegrid.reactor.deferreds import RequestSet
from pipegrid.transfer.mutable.servermap import Copy, ServerMap, Spoilt
from pipegrid.transfer.mutable.slot_client import Slot

PIECE_BYTES = 4 << 20
"""
Maximum number of bytes in one read; a larger gap takes several reads. While a long response arrives, nothing
else is requested on its connection, and another connection costs two round trips; so the limit is high enough
that a share of most files is one read.
"""
NEAR_BYTES = 1 << 10
"""Gaps with at most this many bytes between them are one read: a request costs as much as this many bytes."""


class Retrieve:
    """
    Reads bytes of one version.

    The loop finds out which bytes of the segments in the window are missing, requests them, decodes what can
    be decoded, passes the plaintext on, and waits. A share that is damaged, or whose server fails, is
    replaced by another copy or another share; if none is left, the error contains the number of good shares.

    A share that another client overwrites during the read looks damaged, since parts of it belong to another
    version. So the beginning of a share that looks damaged is read again. The share is reported as damaged,
    also to its server, only if it still has the version being read.

    Args:
        found: knows which servers have the version's shares.
        ready: returns whether more plaintext may be passed on now; the caller fires ``changed`` when this
            becomes true.
        write: gets plaintext, in order.

    Attributes:
        changed: the caller fires it when ``ready`` has changed.
        servers: maps a share number to the name of the server from which the share was read.
        corrupt: damage of shares that no client has overwritten meanwhile.
        spoilt: the damaged shares; see ``servermap.Spoilt``.
    """

    def __init__(
        self,
        slot: Slot,
        found: ServerMap,
        version: Version,
        write: Callable[[Sequence[Buffer]], None],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._requests: RequestSet[int] = RequestSet(slot.clock)
        self.changed = self._requests.changed
        self.servers: dict[int, str] = {}
        self.corrupt: list[CorruptionError] = []
        self.spoilt: dict[tuple[str, int, Version], CorruptionError] = {}
        self._slot = slot
        self._version = version
        self._write = write
        self._ready = ready
        readkey = None if slot.cap.access == "verify" else slot.cap.readonly().secret
        self._reader = VersionReader(version, readkey)
        self._holders = found.holders(version)
        self._in_use: dict[int, Copy] = {}
        self._asked: dict[int, Spans] = {}
        self._reported_count = 0
        self._suspects: RequestSet[int] = RequestSet(slot.clock)

    async def read(self, start: int, length: int) -> None:
        """
        Pass on the plaintext bytes ``[start, start + length)``, which lie within the version.

        Raises:
            NotEnoughSharesError: too few good shares can be read.
            CorruptionError: the version itself is inconsistent.
        """
        geometry = self._version.geometry
        segment_bytes = max(1, geometry.segment_bytes)
        segment = start // segment_bytes
        end_segment = -(-(start + length) // segment_bytes) if length else segment
        stored = max(1, geometry.required_shares * (geometry.block_bytes + geometry.salt_bytes))
        window = max(1, self._slot.settings.memory_bytes // stored)
        ahead = segment
        try:
            while segment < end_segment:
                self._choose()
                # Advance the window in large steps, so that requests are large.
                if ahead - segment <= window // 2:
                    ahead = min(segment + window, end_segment)
                self._ask(segment, ahead)
                job = None
                if self._ready():
                    first = segment * segment_bytes
                    job = self._reader.job(segment, max(0, start - first), start + length - first)
                if job is not None:
                    result = await self._slot.workers.run_if_large(stored, job.run)
                    pieces = self._reader.finish(result)
                    if pieces is not None:
                        self._write(pieces)
                        segment += 1
                elif not self._has_lost_shares():
                    await self._requests.wait()
            await self._look_at_suspects()
        except BaseException:
            self._reader.release_all()
            raise
        finally:
            self._note_corrupt()
            self._requests.cancel()

    async def _look_at_suspects(self) -> None:
        """Wait until it is known which suspect shares are damaged, at most for the grace."""
        self._note_corrupt()
        clock = self._slot.clock
        end_s = clock.seconds() + self._slot.settings.grace_s
        while self._suspects.running and clock.seconds() < end_s:
            await self._suspects.wait(end_s - clock.seconds())

    def _has_lost_shares(self) -> bool:
        """Return whether chosen shares turned out bad, so that others must be chosen."""
        return len(self._reader.shares_in_use) < len(self._in_use) or bool(self._reader.lacking)

    def _choose(self) -> None:
        """Choose shares until there are k; replace each share that failed by the next best one."""
        self._note_corrupt()
        for number in self._in_use.keys() - set(self._reader.shares_in_use):
            del self._in_use[number]
        while self._reader.lacking:
            free = [n for n, copies in self._holders.items() if copies and n not in self._in_use]
            if not free:
                few = counted(len(self._in_use), "good share")
                raise NotEnoughSharesError(
                    f"only {few} of version {self._version.name} of this file can be fetched, and "
                    f"{self._version.required_shares} are needed; try again when more "
                    "servers can be reached, or repair it",
                    len(self._in_use),
                    self._version.required_shares,
                )
            number = free[0]
            copy = self._holders[number].pop(0)
            assert copy.share is not None
            self._in_use[number] = copy
            self._asked[number] = Spans()
            self._reader.add_share(copy.share)
            self.servers[number] = copy.peer.name

    def _ask(self, first: int, end: int) -> None:
        """Request the bytes of these segments that are missing and were not requested yet."""
        for number, copy in list(self._in_use.items()):
            asked = self._asked[number]
            wanted = Spans()
            for gap in self._reader.missing(number, first, end):
                wanted.update(asked.gaps(*gap))
            share = copy.share
            assert share is not None
            for a, b in wanted.merged(NEAR_BYTES):
                asked.add(a, b)
                for at in range(a, b, PIECE_BYTES):
                    length = min(PIECE_BYTES, b - at)
                    self._requests.start(self._fetch(copy, share, at, length), number)

    async def _fetch(self, copy: Copy, share: MutableShare, offset: int, length: int) -> None:
        try:
            data = await self._slot.read(copy.peer, copy.number, offset, length)
            share.answered(offset, length, data)
        except CorruptionError as error:
            if self._in_use.get(copy.number) is copy:
                self._reader.drop_share(copy.number)
                self._suspect(copy, error)
        except ServerError:
            if self._in_use.get(copy.number) is copy:
                self._reader.drop_share(copy.number)

    def _note_corrupt(self) -> None:
        """Record the new damage that the reader has found."""
        for error in self._reader.corrupt[self._reported_count :]:
            copy = self._in_use.get(-1 if error.share_number is None else error.share_number)
            if copy is None:
                self.corrupt.append(error)
            else:
                self._suspect(copy, error)
        self._reported_count = len(self._reader.corrupt)

    def _suspect(self, copy: Copy, error: CorruptionError) -> None:
        """
        Record a share that looks damaged, and find out why; this ``Retrieve`` does not use it again in any
        case.
        """
        error.server = copy.peer.name
        self.spoilt[copy.peer.identity.server_id, copy.number, self._version] = error
        self._suspects.start(self._look_again(copy, error), copy.number)

    async def _look_again(self, copy: Copy, error: CorruptionError) -> None:
        """
        Report a damaged share to its server, which may not know of the damage, unless another client has
        overwritten the share meanwhile.
        """
        if await self._slot.has_changed(copy.peer, copy.number, self._version):
            return
        self.corrupt.append(error)
        telling = Deferred.fromCoroutine(
            self._slot.advise_corrupt(copy.peer, copy.number, str(error))
        )
        telling.addErrback(lambda _: None)


async def read_whole(
    slot: Slot,
    found: ServerMap,
    version: Version,
    on_damaged: Callable[[Spoilt], None] | None = None,
) -> bytes:
    """
    Return all of a version's plaintext; see ``Retrieve.read``.

    Args:
        on_damaged: called with the damaged shares when the read ends, with or without success.
    """
    pieces: list[Buffer] = []
    reader = Retrieve(slot, found, version, pieces.extend)
    try:
        await reader.read(0, version.size)
    except BaseException:
        pieces.clear()  # free the memory, as ``VersionReader.release_all`` does
        raise
    finally:
        if on_damaged is not None:
            on_damaged(reader.spoilt)
    return b"".join(pieces)
