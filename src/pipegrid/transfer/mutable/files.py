"""
The mutable files of a grid: what each operation needs, brought together; and changes of one file, joined.

**Joined changes.** Edits of one file that are asked for while it is being written wait, and are then applied
one behind the other and written at once: a thousand links into a directory are a few versions. An edit that
raises fails for its caller alone; for good, once the others have been written without it.

**Caution.** One process has its own writes to one file one after the other, so that it never meets itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredLock, fail
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from pipegrid.core.caps import MutableCap
from pipegrid.core.hashes import Buffer
from pipegrid.core.leases import ClientSecrets
from pipegrid.core.mutable.book import ShareBook
from pipegrid.core.mutable.encoding import encode
from pipegrid.core.mutable.geometry import SALT_BYTES, Format, MutableGeometry
from pipegrid.core.mutable.versions import FIRST_SEQUENCE_NUMBER, Version
from pipegrid.core.placement import servers_of_happiness
from pipegrid.errors import (
    CapError,
    CorruptionError,
    NotEnoughSharesError,
    UncoordinatedWriteError,
    UsageError,
)
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.mutable.checking import (
    MutableCheck,
    MutableCheckResult,
    check_repairable,
)
from pipegrid.transfer.mutable.known import KnownFiles
from pipegrid.transfer.mutable.mapping import ShareMap, place
from pipegrid.transfer.mutable.modifying import (
    Edit,
    Modification,
    WriteResult,
    check_happy,
    not_writable,
    remember,
    rollback,
    write_result,
)
from pipegrid.transfer.mutable.publishing import Publication
from pipegrid.transfer.mutable.reading import ContentReader
from pipegrid.transfer.mutable.signingkeys import SigningKeys
from pipegrid.transfer.mutable.slot import Slot, open_slot
from pipegrid.transfer.mutable.surveying import Hints, Survey
from pipegrid.transfer.mutable.updating import Update, splice
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.results import RenewResult, RepairResult
from pipegrid.transfer.settings import MutableSettings

READ_ATTEMPTS = 3
"""A version that is written over while it is read is looked for again, if nothing was handed on yet."""
MAX_JOINED = 100_000
"""Edits of one file that wait to be joined; more is a caller who does not wait for any."""

Merge = Callable[[Sequence[bytes]], bytes]


@attrs.frozen
class CreateResult:
    """A new mutable file: its write cap, and how it was written."""

    cap: MutableCap
    written: WriteResult


@attrs.frozen
class ReadResult:
    """
    What was read.

    Attributes:
        version: of the file.
        size: bytes handed on.
        shares_used: share number to the nickname of the server it came from.
        corrupt: damage that was found on the way and worked around.
        newer_unrecoverable: there are traces of a newer version, which cannot be read (yet).
    """

    version: Version
    size: int
    shares_used: dict[int, str]
    corrupt: list[CorruptionError]
    newer_unrecoverable: bool


@attrs.define(eq=False)
class _Line:
    """The writes to one file of this process, one after the other."""

    lock: DeferredLock = attrs.field(factory=DeferredLock)
    waiting: list[tuple[Edit, Deferred[WriteResult]]] = attrs.field(factory=list)
    merge: Merge | None = None
    runs: bool = False


class MutableFiles:
    """
    All operations on mutable files.

    Args:
        peers: the servers; looked at anew for each operation.
        usual: k and n of new files.
        random: for waits that must differ from those of other writers.
    """

    def __init__(
        self,
        *,
        clock: IReactorTime,
        workers: CpuWorkers,
        peers: Sequence[Peer],
        client_secrets: ClientSecrets,
        usual: tuple[int, int],
        settings: MutableSettings,
        known: KnownFiles,
        random: Callable[[], float] | None = None,
    ) -> None:
        self.keys = SigningKeys(workers)
        self.known = known
        self._clock = clock
        self._workers = workers
        self._peers = peers
        self._client_secrets = client_secrets
        self._usual = usual
        self._settings = settings
        self._random = random or Random().random
        self._lines: dict[bytes, _Line] = {}
        self._running: set[Deferred[Any]] = set()

    def slot(self, cap: MutableCap) -> Slot:
        """Return the file's slot."""
        return open_slot(
            cap, self._peers, self._clock, self._workers, self._settings, self._client_secrets
        )

    # Making.

    async def create(
        self, content: bytes, format: Format, usual: tuple[int, int] | None = None
    ) -> CreateResult:
        """
        Store a new mutable file.

        Raises:
            UnhappyError: too few servers took shares.
            UsageError: it is too long to be written whole.
        """
        if len(content) > self._settings.max_content_bytes:
            raise UsageError(
                f"a mutable file of {len(content)} bytes is too long to be written whole, "
                f"{self._settings.max_content_bytes} are allowed; store it as an immutable file"
            )
        k, n = usual or self._usual
        geometry = MutableGeometry(format, len(content), k, n)
        key = await self.keys.take()
        cap = key.cap(format)
        slot = self.slot(cap)
        salts = [os.urandom(SALT_BYTES) for _ in range(geometry.num_salts)]
        encoded = await self._workers.run_if_large(
            6 * len(content), encode, content, geometry, FIRST_SEQUENCE_NUMBER, key, salts
        )
        places = place(n, {}, slot.peers, set())
        outcome = await Publication(slot, encoded, places, {}).run()
        if not outcome.is_clean:  # a storage index nobody else can have
            raise UncoordinatedWriteError(
                "servers have shares of a mutable file that was only just made; try again", None, 1
            )
        check_happy(slot, encoded.version, outcome)
        self.known.of(cap.storage_index).signing_key = key
        remember(self.known, slot, encoded, content, outcome, {})
        return CreateResult(cap, write_result(encoded.version, outcome, 1))

    # Reading.

    async def look(self, cap: MutableCap, accept_older: bool = False) -> tuple[Slot, ShareMap]:
        """
        Find out which version there is to read: ``found.choice().best``.

        Raises:
            NotEnoughSharesError: none.
            RollbackError: only an older one than was seen before.
        """
        if cap.access == "verify":
            raise CapError("this is a verifier cap: it checks a file's shares but cannot read it")
        slot = self.slot(cap)
        known = self.known.of(slot.storage_index)
        hints: Hints = {}
        by_id = {peer.identity.server_id: peer for peer in slot.peers}
        for server, numbers in known.copies.items():
            if server in by_id:
                hints[by_id[server]] = frozenset(numbers)
        least = (0, b"") if accept_older else known.newest
        book = ShareBook(cap, signing_key=known.signing_key)
        survey = Survey(slot, book, self._settings.read_bytes, hints, self._usual)
        found = await survey.for_reader(least)
        best = found.choice().best
        if best is None:
            raise _unreadable(found, self._usual[0])
        newest = (best.sequence_number, best.root_hash)
        if newest < known.newest and best.sequence_number < known.sequence_number:
            if not accept_older:
                raise rollback(best, known)
        elif newest > known.newest:
            known.saw(best)
            if known.version != best:
                known.forget_version()
                known.copies = _copies(found, best)
            self.known.save(slot.storage_index, known)
        return slot, found

    async def read(
        self,
        cap: MutableCap,
        write: Callable[[Sequence[Buffer]], None],
        start: int = 0,
        length: int | None = None,
        *,
        accept_older: bool = False,
        ready: Callable[[], bool] = lambda: True,
        reading: Callable[[ContentReader], None] = lambda reader: None,
    ) -> ReadResult:
        """
        Read a file, or a range of it.

        Args:
            write: takes the plaintext, in order.
            ready: whether it takes more; ``reading`` is given whose ``changed`` is then to be fired.

        Raises:
            NotEnoughSharesError, RollbackError, CorruptionError: as ``look`` and ``ContentReader.read``.
            UsageError: the range begins behind the end.
        """
        handed = 0

        def count(pieces: Sequence[Buffer]) -> None:
            nonlocal handed
            handed += sum(map(len, pieces))
            write(pieces)

        attempt = 0
        while True:
            attempt += 1
            slot, found = await self.look(cap, accept_older)
            choice = found.choice()
            version = choice.best
            assert version is not None
            if not 0 <= start <= version.size:
                raise UsageError(
                    f"the range begins at byte {start}, but the file has {version.size} bytes"
                )
            end = version.size if length is None else min(version.size, start + length)
            reader = ContentReader(slot, found, version, count, ready)
            reading(reader)
            try:
                await reader.read(start, end - start)
            except (NotEnoughSharesError, CorruptionError):
                if handed or attempt == READ_ATTEMPTS:
                    raise
                continue
            corrupt = found.corrupt + reader.corrupt
            newer = bool(choice.newer_unrecoverable)
            return ReadResult(version, end - start, reader.servers, corrupt, newer)

    # Writing.

    async def look_ahead(self, cap: MutableCap) -> None:
        """Find out what the next change needs to know; see ``Modification.look_ahead``."""
        await self._in_line(
            cap, lambda slot: self._modification(slot, lambda old: old).look_ahead()
        )

    async def overwrite(self, cap: MutableCap, content: bytes) -> WriteResult:
        """
        Replace the content, whatever it was.

        Raises:
            UncoordinatedWriteError: somebody else wrote at the same time, and their version is there now.
        """
        result: WriteResult = await self._in_line(
            cap, lambda slot: self._modification(slot, lambda _: content, replaces=True).run()
        )
        return result

    async def update(self, cap: MutableCap, offset: int, data: bytes) -> WriteResult:
        """
        Write bytes at an offset, at the file's end at most, and leave the others as they are.

        Raises:
            UsageError: the offset lies behind the end.
        """

        async def change(slot: Slot) -> WriteResult:
            tried: list[Version] = []
            if data and cap.kind == "MDMF":
                update = Update(slot, self.known, offset, data, self._usual)
                done = await update.run()
                if done is not None:
                    return done
                tried += [] if update.tried is None else [update.tried]
            edit: Edit = lambda old: splice(old, offset, data)  # noqa: E731
            return await self._modification(slot, edit, tried=tried).run()

        result: WriteResult = await self._in_line(cap, change)
        return result

    def modify(
        self, cap: MutableCap, edit: Edit, merge: Merge | None = None
    ) -> Deferred[WriteResult]:
        """
        Apply an edit to the content, as often as it takes; fires when it is in the version that is there.

        Those that are asked for at the same time are joined. Cancelling gives up waiting, and takes the edit
        back if it was not applied yet.

        Args:
            edit: from the old content to the new one; a pure function, perhaps called more than once, also
                with content that it has changed before.
            merge: makes one content of those of two versions between which nothing else decides.
        """
        if not (isinstance(cap, MutableCap) and cap.access == "write"):
            return fail(not_writable())
        line = self._lines.setdefault(cap.storage_index, _Line())
        if merge is not None:
            line.merge = merge
        if len(line.waiting) >= MAX_JOINED:
            raise UsageError(
                f"{MAX_JOINED} changes of one file wait already; wait for some of them"
            )

        def cancelled(gone: Deferred[WriteResult]) -> None:
            line.waiting = [each for each in line.waiting if each[1] is not gone]

        waiting: Deferred[WriteResult] = Deferred(cancelled)
        line.waiting.append((edit, waiting))
        if not line.runs:
            line.runs = True
            running = Deferred.fromCoroutine(self._run_line(cap, line))
            self._running.add(running)
            running.addErrback(lambda failure: failure.trap(CancelledError))
            running.addBoth(lambda _: self._running.discard(running))
        return waiting

    def close(self) -> None:
        """Give up the changes that are under way."""
        for running in list(self._running):
            running.cancel()

    async def _run_line(self, cap: MutableCap, line: _Line) -> None:
        try:
            await deferLater(self._clock, 0)  # what is asked for in this turn is one change
            while line.waiting:
                await self._in_line(cap, lambda slot: self._apply_waiting(slot, line))
        finally:
            line.runs = False
            for _, waiting in line.waiting:
                waiting.errback(CancelledError())
            self._forget_line(cap.storage_index, line)

    async def _apply_waiting(self, slot: Slot, line: _Line) -> None:
        joined, line.waiting = line.waiting, []
        failures: dict[int, Failure] = {}
        final: dict[int, Failure] = {}

        def edit_all(old: bytes) -> bytes:
            if change.attempts:
                # What failed may have been written without it: it must not find what came behind it.
                final.update(failures)
            failures.clear()
            failures.update(final)
            for index, (edit, waiting) in enumerate(joined):
                if waiting.called or index in final:  # nobody waits for it any more
                    continue
                try:
                    old = edit(old)
                except Exception:
                    failures[index] = Failure()
            return old

        change = self._modification(
            slot, edit_all, merge=line.merge, in_doubt=lambda: bool(failures)
        )
        try:
            result: Any = await change.run()
        except Exception:
            result = Failure()
        for index, (_, waiting) in enumerate(joined):
            if not waiting.called:
                waiting.callback(failures.get(index, result))

    def _modification(self, slot: Slot, edit: Edit, **options: Any) -> Modification:
        return Modification(slot, self.known, edit, self._usual, self._random, **options)

    async def _in_line(self, cap: MutableCap, write: Callable[[Slot], Any]) -> Any:
        """Write to a file when this process's other writes to it have ended."""
        index = cap.storage_index
        line = self._lines.setdefault(index, _Line())
        await line.lock.acquire()
        try:
            return await write(self.slot(cap))
        finally:
            line.lock.release()
            self._forget_line(index, line)

    def _forget_line(self, index: bytes, line: _Line) -> None:
        idle = not (line.waiting or line.runs or line.lock.locked or line.lock.waiting)
        if idle and self._lines.get(index) is line:
            del self._lines[index]

    # Upkeep.

    async def check(
        self, cap: MutableCap, verify: bool = False, add_lease: bool = False
    ) -> MutableCheckResult:
        """Ask all servers for all versions; see ``checking``."""
        return await MutableCheck(self.slot(cap), cap, self._usual, verify, add_lease).run()

    async def repair(self, cap: MutableCap, force: bool = False) -> RepairResult:
        """
        Verify every share, and write the best version anew unless all is well.

        Args:
            force: also where a newer version that cannot be read, or a rival, is lost by it.

        Raises:
            CapError: the cap cannot write.
            NotEnoughSharesError: no version can be read.
            UncoordinatedWriteError: see ``force``.
        """
        if cap.access != "write":
            raise CapError(
                "to repair a mutable file is to write it: use its write cap, or ask whoever has it"
            )

        began_s = self._clock.seconds()

        async def write(slot: Slot) -> RepairResult:
            before = await MutableCheck(slot, cap, self._usual, verify=True).run()
            if before.healthy:
                return RepairResult(cap, before, before, {}, [], [], self._since(began_s))
            if before.recoverable and not force:
                check_repairable(before)
            written = await self._modification(slot, lambda old: old, always=True).run()
            return _repaired(cap, before, written, self._since(began_s))

        result: RepairResult = await self._in_line(cap, write)
        return result

    async def renew(self, cap: MutableCap) -> RenewResult:
        """Add or renew this client's lease on every share, wherever one is."""
        result = await self.check(cap, add_lease=True)
        renewed = set(result.renewed)
        leases = {
            number: [name for name in names if name in renewed]
            for number, names in result.good_shares.items()
        }
        return RenewResult(
            cap,
            {number: names for number, names in leases.items() if names},
            result.required_shares,
            result.total_shares,
            result.unreachable,
            result.lease_problems,
        )

    def _since(self, began_s: float) -> float:
        return self._clock.seconds() - began_s


def _repaired(
    cap: MutableCap, before: MutableCheckResult, written: WriteResult, elapsed_s: float
) -> RepairResult:
    placed = written.placed
    after = attrs.evolve(
        before,
        version=written.version,
        good_shares=placed,
        healthy=len(placed) == written.version.total_shares and not written.reasons,
        recoverable=True,
        happiness=servers_of_happiness({number: set(names) for number, names in placed.items()}),
        other_versions=[],
        newer_unrecoverable=False,
        rivals=False,
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


def _unreadable(found: ShareMap, k: int) -> NotEnoughSharesError:
    choice = found.choice()
    most = max((len(shares) for shares in choice.shares.values()), default=0)
    needed = max((v.required_shares for v in choice.shares), default=k)
    silent = f"; {len(found.failed)} servers did not answer" if found.failed else ""
    wrong = f"; {len(found.corrupt)} shares are damaged" if found.corrupt else ""
    return NotEnoughSharesError(
        f"no version of this mutable file can be read: {most} shares of one were found, and {needed} are "
        f"needed{silent}{wrong}; try again when more servers can be reached, or check the cap",
        most,
        needed,
    )


def _copies(found: ShareMap, version: Version) -> dict[str, tuple[int, ...]]:
    copies: dict[str, list[int]] = {}
    for number, held in found.holders(version).items():
        for copy in held:
            copies.setdefault(copy.peer.identity.server_id, []).append(number)
    return {server: tuple(numbers) for server, numbers in copies.items()}
