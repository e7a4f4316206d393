"""Prune: release the leases of objects that only forgotten or killed runs have stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import attrs

from pipegrid.core.caps import ChkCap, DirectoryCap, parse_cap
from pipegrid.errors import CannotReach, CapError, PipegridError, ServerError, UsageError
from pipegrid.transfer.lease_release import LeaseReleaser
from pipegrid.tree.backup.backup_database import BackupDatabase
from pipegrid.tree.backup.backup_state_directory import BackupPlace
from pipegrid.tree.backup.reachability import (
    CATALOGUE,
    ObjectSets,
    Purpose,
    Reachability,
    share_bytes_of,
)
from pipegrid.tree.prune_roots import Root, kept_caps, tahoe_backup_objects
from pipegrid.tree.tree_grid import Grid
from pipegrid.wire.storage_messages import Released

# Nothing is released that is reachable from a run of the catalogue, an alias, a pin or another cap in the
# client's ``private``. Before the first lease is released:
#
# * all servers have answered, and everything that is kept was read, mutable directories in their newest
#   version; otherwise nothing is released;
# * no backup of this client runs, and none of its processes stores anything (``grid.storing_lock``);
# * under that lock, changes of what is kept were read as well;
# * the client has durably forgotten that the objects are stored, so that the next backup sends them again;
# * the objects are recorded durably, so that after a crash the next prune releases the remaining ones.
#
# Servers keep a lease that was renewed after the prune began, for example by a put on another machine with
# the same secrets.

LOOKS = 5
"""How many times a prune looks for new changes of what is kept, before it gives up."""


@attrs.frozen
class PruneResult:
    """
    What a prune has done, or would do.

    Attributes:
        objects: number of files and directories that are no longer reachable.
        share_bytes: size of their shares on all servers, computed from the sizes that are known.
        released: what servers have done.
        undone: number of objects whose leases some server may still have; the next prune tries again.
        without: nicknames of servers that cannot release leases; their leases end by themselves.
        kept, kept_bytes: number of objects that no run contains but that are still kept, for example by an
            alias, and the size of their shares.
        is_complete: whether every forgotten run was read.
        problems: why some leases were not released.
    """

    objects: int
    share_bytes: int
    released: Released = attrs.field(factory=Released)
    undone: int = 0
    without: tuple[str, ...] = ()
    kept: int = attrs.field(default=0, kw_only=True)
    kept_bytes: int = attrs.field(default=0, kw_only=True)
    is_complete: bool = True
    problems: tuple[PipegridError, ...] = ()


class Prune:
    """
    One prune of one client.

    Args:
        place: the state directory of the client's backups.
        say: called with sentences for the user.
        now: returns the seconds since 1970.
    """

    def __init__(
        self,
        grid: Grid,
        place: BackupPlace,
        *,
        say: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self._grid = grid
        self._place = place
        self._say = say
        self._now = now

    async def run(self, dry_run: bool = False) -> PruneResult:
        """
        Release the leases of all candidates that are not reachable.

        Args:
            dry_run: only find out what would be released; nothing is changed, neither locally nor on servers.

        Raises:
            CannotReach: a server does not answer, or something that is kept cannot be read.
            UsageError: a backup is running, another process of this client stores files, or there is no
                catalogue.
            SinkError: the client's state cannot be read or written.
        """
        with (
            self._place.locked(),
            closing(ObjectSets()) as sets,
            closing(self._database(dry_run)) as database,
        ):
            return await self._prune(sets, database, dry_run)

    def _database(self, read_only: bool) -> BackupDatabase:
        return BackupDatabase(
            self._place.database, b"", "/", now=self._now, say=self._say, read_only=read_only
        )

    async def _prune(
        self, sets: ObjectSets, database: BackupDatabase, dry_run: bool
    ) -> PruneResult:
        try:
            releaser = await self._grid.lease_releaser()
        except ServerError as error:
            raise CannotReach(
                f"a server does not answer, so what is kept may not be known, and nothing was released: "
                f"{error}"
            ) from error
        reach = Reachability(self._grid, sets)
        runs, kept = self._run_roots(), self._kept_roots()
        await reach.mark(runs, Purpose.RUN)
        await reach.mark(kept, Purpose.KEPT)
        self._mark_tahoe_backups(sets)
        candidates = self._place.candidates
        sets.add_noted(candidates.indexes())
        sets.add_stored((cap.storage_index, share_bytes_of(cap)) for _, cap in _caps(database))
        is_complete = await reach.collect(candidates.forgotten())
        without = tuple(releaser.without)
        if dry_run or not releaser.is_possible:
            return _found(sets, without, is_complete)
        lock = self._grid.storing_lock
        await lock.exclude()
        try:
            await self._look_again(reach, sets, {*runs, *kept})
            found = _found(sets, without, is_complete)
            candidates.set_indexes(sets.still_noted())
            if is_complete:
                candidates.set_forgotten(())
            database.forget(
                text for text, cap in _caps(database) if sets.is_unreached(cap.storage_index)
            )
            released, problems = await self._release(releaser, sets)
        finally:
            lock.release()
        undone = sets.totals()[0]
        return attrs.evolve(found, released=released, undone=undone, problems=tuple(problems))

    def _run_roots(self) -> list[Root]:
        """Return the catalogue, and the stored runs that must still be added to it."""
        noted = self._place.noted(self._say)
        if noted.cap is None:
            raise UsageError(
                "this client has no list of backups, so which objects are still needed is not known; "
                "nothing was released"
            )
        unlisted = [Root(f"the run {run.name} {run.time}", run.cap) for run in noted.unlisted]
        return [Root(CATALOGUE, noted.cap), *unlisted]

    def _kept_roots(self) -> list[Root]:
        """
        Return all caps that are kept in addition to the runs; these include the caps of earlier catalogues.
        """
        earlier = [
            Root(f"an earlier list of backups in {self._place.candidates.catalogues_path}", cap)
            for cap in self._place.candidates.catalogues()
        ]
        return [*kept_caps(self._grid.config.directory), *earlier]

    def _mark_tahoe_backups(self, sets: ObjectSets) -> None:
        for index in tahoe_backup_objects(self._grid.config.directory):
            sets.reach(index, Purpose.KEPT)

    async def _look_again(self, reach: Reachability, sets: ObjectSets, known: set[Root]) -> None:
        """
        Mark as reached what other machines or this client have changed or added since the first reading;
        repeat this until nothing has changed.
        """
        for _ in range(LOOKS):
            changed = await reach.mark_changes()
            new = {*self._run_roots(), *self._kept_roots()} - known
            await reach.mark(new, Purpose.KEPT)
            self._mark_tahoe_backups(sets)
            known |= new
            if not (changed or new):
                return
        raise CannotReach(
            "the list of backups or an alias keeps changing, so nothing was released; try again later"
        )

    async def _release(
        self, releaser: LeaseReleaser, sets: ObjectSets
    ) -> tuple[Released, list[PipegridError]]:
        """
        Release the leases of all unreached candidates; remove the candidates for which no server has a lease.
        """
        done = Released()
        problems: dict[str, PipegridError] = {}
        for indexes in sets.unreached():
            outcome = await releaser.release(indexes)
            done = done.plus(outcome.done)
            sets.released(set(indexes) - outcome.undone)
            for problem in outcome.problems:
                problems.setdefault(str(problem), problem)
        self._place.candidates.set_indexes(sets.still_noted())
        return done, list(problems.values())


def _found(sets: ObjectSets, without: tuple[str, ...], is_complete: bool) -> PruneResult:
    """Return the result of a prune before it releases anything."""
    kept, kept_bytes = sets.kept_totals()
    return PruneResult(
        *sets.totals(), without=without, kept=kept, kept_bytes=kept_bytes, is_complete=is_complete
    )


def _caps(database: BackupDatabase) -> Iterator[tuple[str, ChkCap]]:
    """
    Yield the caps in the database whose objects have shares on servers; each comes as text and as a cap.
    """
    for text in database.stored_caps():
        try:
            cap = parse_cap(text)
        except CapError:
            continue
        file = cap.file if isinstance(cap, DirectoryCap) else cap
        if isinstance(file, ChkCap):
            yield text, file
