"""Operations on mutable files; key pairs generated in advance."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

import attrs
from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.caps import MutableCap
from pipegrid.core.hashes import Buffer
from pipegrid.core.mutable import keys
from pipegrid.core.mutable.encoder import encode
from pipegrid.core.mutable.keys import SigningKey
from pipegrid.core.mutable.mutable_share import VerifiedVersions
from pipegrid.core.mutable.versions import (
    FIRST_SEQUENCE_NUMBER,
    SALT_BYTES,
    Format,
    MutableGeometry,
    Version,
)
from pipegrid.errors import (
    CapError,
    CorruptionError,
    NotEnoughSharesError,
    PipegridError,
    UncoordinatedWriteError,
    UsageError,
)
from pipegrid.reactor.deferreds import Timer
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.mutable import mutable_check
from pipegrid.transfer.mutable.base_version_search import ModifyOptions, Redo
from pipegrid.transfer.mutable.mdmf_update import Update, splice
from pipegrid.transfer.mutable.modify import ContentEdit, Modification
from pipegrid.transfer.mutable.mutable_failure_messages import not_writable, rollback, unreadable
from pipegrid.transfer.mutable.publish import (
    CreateResult,
    Publish,
    WriteResult,
    write_result,
)
from pipegrid.transfer.mutable.retrieve import Retrieve
from pipegrid.transfer.mutable.servermap import ServerMap, ServermapUpdate, Spoilt, place
from pipegrid.transfer.mutable.slot_client import Slot
from pipegrid.transfer.mutable.version_cache import VersionCache, remember, remember_read
from pipegrid.transfer.mutable.write_queue import Merge, WriteQueues
from pipegrid.transfer.peers import TransferContext
from pipegrid.transfer.results import RenewResult, RepairResult
from pipegrid.transfer.server_space import Capacity
from pipegrid.transfer.settings import MutableSettings

T = TypeVar("T")

# Key pairs for new files, generated in worker threads, and in advance if several are needed.
#
# Generating a key takes 0.1 to 0.3 s on one core; the time varies with the random search for primes. A
# command that creates one file generates the key while connections are established. A program that creates a
# second file will probably create a third, so from the second file on some keys are generated in advance, one
# after another, which evens out the waiting times. A long-running program keeps more keys ready, and
# generates them when no key was taken for a while, so that they do not compete with the creation of files for
# the processors.

AHEAD = 3
"""Number of keys that are kept ready for a program that creates several files."""

QUIET_S = 10.0
"""A long-running program generates keys in advance when no key was taken for this many seconds."""


class SigningKeys:
    """Provides key pairs, each used once."""

    def __init__(self, workers: CpuWorkers) -> None:
        self._workers = workers
        self._ready: deque[SigningKey] = deque()
        self._making: Deferred[SigningKey | None] | None = None
        self._taken = 0
        self._reserve = 0
        self._quiet: Timer | None = None

    def keep(self, count: int, clock: IReactorTime) -> None:
        """
        Keep ``count`` keys ready; generate them one after another when no key was taken for ``QUIET_S``.
        """
        self._reserve = count
        self._quiet = Timer(clock, lambda: self._prepare(self._reserve))
        self._quiet.set(QUIET_S)

    def close(self) -> None:
        """Generate no more keys in advance."""
        if self._quiet is not None:
            self._quiet.stop()
            self._quiet, self._reserve = None, 0

    def prepare(self) -> None:
        """
        Start to generate a key, unless enough are ready; generate more in advance if several were taken.
        """
        self._prepare(AHEAD if self._taken > 1 and not self._reserve else 1)

    def _prepare(self, wanted: int) -> None:
        if self._making is not None or len(self._ready) >= wanted:
            return
        try:
            making: Deferred[SigningKey | None] = self._workers.run(keys.generate)
        except UsageError:  # the program ends, so no key is needed
            return
        making.addErrback(lambda _: None)  # on failure the waiting caller generates another key
        self._making = making
        making.addCallback(self._made, making)

    def _made(
        self, key: SigningKey | None, making: Deferred[SigningKey | None]
    ) -> SigningKey | None:
        if self._making is making:  # no caller waits for this key
            self._making = None
            if key is not None:
                self._ready.append(key)
                if self._quiet is not None and not self._quiet.is_set:
                    self._prepare(self._reserve)
                else:
                    self.prepare()
        return key

    def _handed_over(self, making: Deferred[SigningKey | None]) -> Deferred[SigningKey | None]:
        """
        Fire with a key that is being generated; if the caller cancels, keep the key for the next caller.
        """
        waiting: Deferred[SigningKey | None] = Deferred()

        def made(key: SigningKey | None) -> None:
            if not waiting.called:
                waiting.callback(key)
            elif key is not None and len(self._ready) < max(AHEAD, self._reserve):
                self._ready.append(key)

        making.addCallback(made)
        return waiting

    async def take(self) -> SigningKey:
        """Return a key pair that no other caller has."""
        self._taken += 1
        if self._quiet is not None:
            self._quiet.stop()
            self._quiet.set(QUIET_S)
        key: SigningKey | None = None
        if self._ready:
            key = self._ready.popleft()
        elif self._making is not None:
            making, self._making = self._making, None
            if self._taken > 1:
                self.prepare()  # a key for the next caller, generated while this one waits
            key = await self._handed_over(making)
        if key is None:
            key = await self._workers.run(keys.generate)
        if self._taken > 1:
            self.prepare()
        return key


# The operations on the mutable files of a grid.

RangeOf = Callable[[int], tuple[int, "int | None"]]
"""Maps the size of a file to the start and length of a range; length None: to the end."""

RangeOfVersion = Callable[[Version], tuple[int, "int | None"]]
"""A function from a version of a file to the start and length of a range; see ``RangeOf``."""

ContentOfKey = Callable[[bytes], bytes]
"""Maps the write key of a new file to its content; needed for a directory with children."""

READ_ATTEMPTS = 3
"""Maximum attempts to read a version that is being overwritten; no retry once a byte was passed on."""


@attrs.frozen
class ReadResult:
    """
    The result of reading a mutable file.

    Attributes:
        version: the version that was read.
        size: number of bytes passed on.
        shares_used: maps a share number to the nickname of its server.
        corrupt: damage that was found and did not prevent the read.
        newer_unrecoverable: whether shares exist of a newer version that cannot be read (yet).
    """

    version: Version
    size: int
    shares_used: dict[int, str]
    corrupt: list[CorruptionError]
    newer_unrecoverable: bool


class MutableFiles:
    """
    All operations on mutable files.

    Args:
        means: what all transfers of the grid use; its list of servers is read again for each operation.
        usual: k and n of new files.
        random: makes this client's waiting times differ from those of other writers.
    """

    def __init__(
        self,
        means: TransferContext,
        *,
        usual: tuple[int, int],
        settings: MutableSettings,
        known: VersionCache,
        random: Callable[[], float] | None = None,
    ) -> None:
        self.keys = SigningKeys(means.workers)
        self.known = known
        self._means = means
        self._usual = usual
        self._settings = settings
        self._random = random or Random().random
        self._joined = WriteQueues(means.clock, self._change)
        self._capacity = Capacity(means.clock)

    def slot(self, cap: MutableCap) -> Slot:
        """Return the file's slot on the current servers."""
        return Slot(self._means, cap, self._settings)

    # Creating.

    async def create(
        self,
        content: bytes | ContentOfKey,
        format: Format,
        usual: tuple[int, int] | None = None,
        private_key: bytes | None = None,
    ) -> CreateResult:
        """
        Store a new mutable file.

        Args:
            content: the content, or a function that returns it for the file's write key.
            usual: k and n; None: the defaults for new files.
            private_key: DER of the file's RSA key; None: a new key.

        Raises:
            UnhappyError: too few servers accepted shares.
            UncoordinatedWriteError: a file with this private key exists.
            UsageError: the content is too long to be written whole, or ``private_key`` is not such a key.
        """
        if private_key is None:
            key = await self.keys.take()
        else:
            key = await self._means.workers.run(keys.import_signing_key, private_key)
        if callable(content):
            content = content(key.writekey)
        if len(content) > self._settings.max_content_bytes:
            raise UsageError(
                f"a mutable file of {len(content)} bytes is too long to be written whole, "
                f"{self._settings.max_content_bytes} are allowed; store it as an immutable file"
            )
        k, n = usual or self._usual
        geometry = MutableGeometry(format, len(content), k, n)
        cap = key.cap(format)
        slot = self.slot(cap)
        salts = [os.urandom(SALT_BYTES) for _ in range(geometry.num_salts)]
        encoded = await self._means.workers.run_if_large(
            6 * len(content), encode, content, geometry, FIRST_SEQUENCE_NUMBER, key, salts
        )
        places = place(n, {}, slot.peers, set())
        # If the key was generated by this call, no other client can have written under its storage index.
        outcome = await Publish(slot, encoded, places, {}, is_new=private_key is None).run()
        if private_key is not None and not outcome.is_clean:
            raise UncoordinatedWriteError(
                "a mutable file with this private key exists already; give another key"
            )
        self.known.of(cap.storage_index).signing_key = key
        remember(self.known, slot, encoded, content, outcome, {})
        return CreateResult(cap, write_result(slot, encoded.version, outcome, 1))

    # Reading.

    async def look(self, cap: MutableCap, spoilt: Spoilt | None = None) -> tuple[Slot, ServerMap]:
        """
        Query servers for the version to read; return the slot, and the servermap, whose ``choice().best`` is
        this version.

        Raises:
            CapError: the cap does not grant reading.
            NotEnoughSharesError: no version can be read.
            RollbackError: the best version is older than one seen before.
        """
        if cap.access == "verify":
            raise CapError("this is a verifier cap: it checks a file's shares but cannot read it")
        slot = self.slot(cap)
        known = self.known.of(slot.storage_index)
        book = VerifiedVersions(cap, signing_key=known.signing_key)
        read_bytes, hints = self._settings.read_bytes, known.holders(slot.peers)
        survey = ServermapUpdate(slot, book, read_bytes, hints, self._usual, spoilt=spoilt)
        found = await survey.for_reader(known.newest)
        best = found.choice().best
        if best is None:
            raise unreadable(found, self._usual[0])
        newest = (best.sequence_number, best.root_hash)
        if newest < known.newest and best.sequence_number < known.sequence_number:
            raise rollback(best, known)
        return slot, found

    async def size(self, cap: MutableCap) -> int:
        """
        Return how many bytes the best version of a file has.

        Raises:
            NotEnoughSharesError, RollbackError: as ``look``.
        """
        _, found = await self.look(cap, {})
        version = found.choice().best
        assert version is not None
        return version.size

    async def read(
        self,
        cap: MutableCap,
        write: Callable[[Sequence[Buffer]], None],
        range_of: RangeOfVersion = lambda version: (0, None),
        *,
        ready: Callable[[], bool] = lambda: True,
        reading: Callable[[Retrieve], None] = lambda reader: None,
    ) -> ReadResult:
        """
        Read a file, or a range of it.

        Args:
            range_of: called with each version tried; returns start and length of the range, length None: to
                the end of the file.
            write: gets the plaintext, in order.
            ready: returns whether ``write`` takes more.
            reading: gets the ``Retrieve``; the caller fires its ``changed`` when ``ready`` changes.

        Raises:
            NotEnoughSharesError, RollbackError, CorruptionError: as ``look`` and ``Retrieve.read``.
            UsageError: the range begins after the end of the file.
        """
        handed = 0

        def count(pieces: Sequence[Buffer]) -> None:
            nonlocal handed
            handed += sum(map(len, pieces))
            write(pieces)

        attempt, is_read = 0, False
        spoilt: Spoilt = {}
        failed: PipegridError | None = None
        while True:
            attempt += 1
            try:
                slot, found = await self.look(cap, spoilt)
            except NotEnoughSharesError as error:
                raise failed or error from None  # no older version can be read either
            choice = found.choice()
            version = choice.best
            assert version is not None
            start, length = range_of(version)
            end = _end_of_range(version, start, length)
            reader = Retrieve(slot, found, version, count, ready)
            reading(reader)
            try:
                await reader.read(start, end - start)
                is_read = True
            except (NotEnoughSharesError, CorruptionError) as error:
                if handed or attempt == READ_ATTEMPTS:
                    raise
                spoilt, failed = {**spoilt, **reader.spoilt}, error
                continue
            finally:
                if is_read or handed:
                    remember_read(self.known, slot.storage_index, found, version)
            corrupt = found.corrupt + reader.corrupt
            newest = max([*choice.newer_unrecoverable, *found.spoilt_versions], default=version)
            return ReadResult(version, end - start, reader.servers, corrupt, newest > version)

    # Writing.

    async def look_ahead(self, cap: MutableCap) -> None:
        """Query what the next change needs; see ``Modification.look_ahead``."""
        await self._in_turn(
            cap,
            lambda slot: self._modification(slot, lambda old: old, ModifyOptions()).look_ahead(),
        )

    async def overwrite(self, cap: MutableCap, content: bytes) -> WriteResult:
        """
        Replace the content, without regard to the old content.

        Raises:
            UncoordinatedWriteError: another client wrote at the same time, and its version is the current
                one.
        """
        how = ModifyOptions(replaces=True)
        return await self._in_turn(
            cap, lambda slot: self._modification(slot, lambda _: content, how).run()
        )

    async def update(self, cap: MutableCap, offset: int, data: bytes) -> WriteResult:
        """
        Overwrite bytes from ``offset`` on; the offset is at most the file's size. Bytes outside the range
        stay unchanged.

        Raises:
            UsageError: the offset is past the end of the file.
        """

        async def change(slot: Slot) -> WriteResult:
            tried: list[Version] = []
            if data and cap.kind == "MDMF":
                update = Update(slot, self.known, offset, data, self._usual, self._random)
                done = await update.run()
                if done is not None:
                    return done
                tried += update.tried
            edit: ContentEdit = lambda old: splice(old, offset, data)  # noqa: E731
            return await self._modification(slot, edit, ModifyOptions(tried=tried)).run()

        return await self._in_turn(cap, change)

    def modify(
        self,
        cap: MutableCap,
        edit: ContentEdit,
        merge: Merge | None = None,
        redo: Redo | None = None,
    ) -> Deferred[WriteResult]:
        """
        Apply an edit to the content, repeatedly if needed; fire when the current version contains the edit.

        Edits that are requested at the same time are written together. Cancelling stops waiting, and
        withdraws the edit if it was not applied yet.

        Args:
            edit: maps the old content to the new one; a pure function that may be called more than once, even
                with content that it has changed before.
            merge: merges the contents of two versions of equal rank.
            redo: see ``Redo``; used only if all edits that are written together have the same ``redo``.
        """
        if not (isinstance(cap, MutableCap) and cap.access == "write"):
            return fail(not_writable())
        return self._joined.join(cap, edit, merge, redo)

    def close(self) -> None:
        self._joined.close()
        self.keys.close()

    def _change(self, cap: MutableCap, edit: ContentEdit, how: ModifyOptions) -> Modification:
        return self._modification(self.slot(cap), edit, how)

    async def _in_turn(self, cap: MutableCap, write: Callable[[Slot], Awaitable[T]]) -> T:
        return await self._joined.in_turn(cap.storage_index, lambda: write(self.slot(cap)))

    def _modification(self, slot: Slot, edit: ContentEdit, how: ModifyOptions) -> Modification:
        return Modification(slot, self.known, edit, self._usual, self._random, how)

    # Upkeep.

    async def check(
        self, cap: MutableCap, verify: bool = False, add_lease: bool = False
    ) -> mutable_check.MutableCheckResult:
        """Ask all servers for all versions; see ``MutableCheck``."""
        return await self._checked(self.slot(cap), cap, verify, add_lease)

    async def _checked(
        self, slot: Slot, cap: MutableCap, verify: bool, add_lease: bool = False
    ) -> mutable_check.MutableCheckResult:
        check = mutable_check.MutableCheck(
            slot, cap, self._usual, verify, add_lease, self._capacity
        )
        return mutable_check.held_against(self.known.of(slot.storage_index), await check.run())

    async def repair(self, cap: MutableCap, force: bool = False) -> RepairResult:
        """
        Verify every share, and write the best version again unless the file is healthy.

        A file on fewer servers than possible is also written again. Its shares could be copied instead, but
        other clients that have cached the servers of the shares would not update the copies when they write.

        Args:
            force: repair even if this destroys a newer version that cannot be read, or another version with
                the same number, or if a newer version was seen before; the present version becomes the
                newest.

        Raises:
            CapError: the cap does not grant writing.
            NotEnoughSharesError: no version can be read.
            UncoordinatedWriteError, RollbackError: see ``force``.
        """
        if cap.access != "write":
            raise CapError(
                "to repair a mutable file is to write it: use its write cap, or ask for it"
            )

        began_s = self._means.clock.seconds()

        async def write(slot: Slot) -> RepairResult:
            before = await self._checked(slot, cap, verify=True)
            if before.healthy:
                elapsed_s = self._means.clock.seconds() - began_s
                return RepairResult(cap, before, before, {}, [], [], elapsed_s)
            if before.recoverable and not force:
                mutable_check.check_repairable(before, self.known.of(slot.storage_index))
            slot.shortfall = None  # the result itself reports a shortfall
            how = ModifyOptions(always=True)
            written = await self._modification(slot, lambda old: old, how).run()
            elapsed_s = self._means.clock.seconds() - began_s
            return mutable_check.repaired(cap, before, written, elapsed_s)

        return await self._in_turn(cap, write)

    async def renew(self, cap: MutableCap) -> RenewResult:
        """Add or renew this client's lease on every share, on all servers."""
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


def _end_of_range(version: Version, start: int, length: int | None) -> int:
    if not 0 <= start <= version.size:
        raise UsageError(f"the range begins at byte {start}, but the file has {version.size} bytes")
    return version.size if length is None else min(version.size, start + length)
