"""
Reading a version whose shares are known: k shares are read ahead, in pieces, all on their way at once.

One loop: look what is lacking of the segments in the window, ask for it, decode what can be decoded, hand it
on, wait. A share that proves bad, or whose server fails, is replaced by another copy or another share;
when none is left the error says how many good ones there were.

**A share that is written meanwhile** looks damaged, since parts of it are of another version. So the
beginning of one that looks damaged is read once more, and only if it still is of the version that is read the
share is said to be damaged, and its server told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.defer import Deferred

from pipegrid.core.hashes import Buffer
from pipegrid.core.mutable.decoder import VersionReader
from pipegrid.core.mutable.share import MutableShare
from pipegrid.core.mutable.versions import Version
from pipegrid.core.spans import Spans
from pipegrid.core.text import counted
from pipegrid.errors import CorruptionError, NotEnoughSharesError, ServerError
from pipegrid.reactor.deferreds import RequestSet
from pipegrid.transfer.mutable.servermap import Copy, ServerMap, Spoilt
from pipegrid.transfer.mutable.slot import Slot

PIECE_BYTES = 4 << 20
"""
Of one read; larger gaps are several. While a long answer is under way nothing is asked on its connection, and
another one costs two round trips: so of most files a share is one read.
"""
NEAR_BYTES = 1 << 10
"""Gaps that are no further apart are one read: a request costs as much as so many bytes."""


class Retrieve:
    """
    Reads bytes of one version.

    Args:
        found: knows who has its shares.
        ready: whether more plaintext may be handed on now; whoever makes it so fires ``changed``.
        write: takes plaintext, in order.

    Attributes:
        changed: to be fired when ``ready`` has changed.
        servers: share number to the name of the server that it was read from.
        corrupt: what was wrong with shares that nobody has written meanwhile.
        spoilt: the same, by share; see ``servermap.Spoilt``.
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
        self._told = 0
        self._suspects: RequestSet[int] = RequestSet(slot.clock)

    async def read(self, start: int, length: int) -> None:
        """
        Hand on the plaintext bytes ``[start, start + length)``, which lie within the version.

        Raises:
            NotEnoughSharesError: too few good shares can be had.
            CorruptionError: the version itself is inconsistent.
        """
        geometry = self._version.geometry
        segment_bytes = max(1, geometry.segment_bytes)
        segment = start // segment_bytes
        end_segment = -(-(start + length) // segment_bytes) if length else segment
        k = geometry.required_shares
        stored = max(1, k * (geometry.block_bytes + geometry.salt_bytes))
        window = max(1, self._slot.settings.memory_bytes // stored)
        ahead = segment
        try:
            while segment < end_segment:
                self._choose()
                if ahead - segment <= window // 2:  # in large steps, so that requests are large
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
                elif not self._is_bad_news():
                    await self._requests.wait()
            await self._look_at_suspects()
        finally:
            self._note_corrupt()
            self._requests.cancel()

    async def _look_at_suspects(self) -> None:
        """Wait until it is known which shares are damaged, but not long."""
        self._note_corrupt()
        clock = self._slot.clock
        end_s = clock.seconds() + self._slot.settings.grace_s
        while self._suspects.running and clock.seconds() < end_s:
            await self._suspects.wait(end_s - clock.seconds())

    def _is_bad_news(self) -> bool:
        """Whether shares were found to be bad since last time, so that others have to be chosen."""
        return len(self._reader.shares_in_use) < len(self._in_use) or bool(self._reader.lacking)

    def _choose(self) -> None:
        """Have k shares in use, the next best in place of those that failed."""
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
        """Ask for what is lacking of these segments and not asked for yet."""
        for number, copy in list(self._in_use.items()):
            asked = self._asked[number]
            wanted = Spans()
            for gap in self._reader.missing(number, first, end):
                for a, b in asked.gaps(*gap):
                    wanted.add(a, b)
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
        """Note what the reader found wrong."""
        for error in self._reader.corrupt[self._told :]:
            copy = self._in_use.get(-1 if error.share_number is None else error.share_number)
            if copy is None:
                self.corrupt.append(error)
            else:
                self._suspect(copy, error)
        self._told = len(self._reader.corrupt)

    def _suspect(self, copy: Copy, error: CorruptionError) -> None:
        """A share looks damaged; it is of no use here, whatever the reason."""
        error.server = copy.peer.name
        self.spoilt[copy.peer.identity.server_id, copy.number, self._version] = error
        self._suspects.start(self._look_again(copy, error), copy.number)

    async def _look_again(self, copy: Copy, error: CorruptionError) -> None:
        """Tell the server of its share, who else would not know, unless it has changed meanwhile."""
        if await self._slot.has_changed(copy.peer, copy.number, self._version):
            return
        self.corrupt.append(error)
        telling = Deferred.fromCoroutine(
            self._slot.advise_corrupt(copy.peer, copy.number, str(error))
        )
        telling.addErrback(lambda _: None)


async def read_whole(
    slot: Slot, found: ServerMap, version: Version, told: Callable[[Spoilt], None] | None = None
) -> bytes:
    """
    Return all of a version's plaintext; see ``Retrieve.read``.

    Args:
        told: what shares are spoilt, however that ends.
    """
    pieces: list[Buffer] = []
    reader = Retrieve(slot, found, version, pieces.extend)
    try:
        await reader.read(0, version.size)
    finally:
        if told is not None:
            told(reader.spoilt)
    return b"".join(pieces)
