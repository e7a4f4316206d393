"""
What keeps files on a grid: checks, repairs, leases; of one, or of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.arguments import check_callable, check_kind
from pipegrid.core.caps import Cap, LitCap
from pipegrid.core.filecaps import checkable, mutable_file
from pipegrid.grid.base import BaseGrid, started
from pipegrid.transfer.progress import Progress
from pipegrid.transfer.results import CheckResult, RenewResult, RepairResult
from pipegrid.transfer.settings import UpkeepSettings

if TYPE_CHECKING:
    from pipegrid.transfer.upkeep.keeper import Keeper
    from pipegrid.transfer.upkeep.upkeep import Todo, Upkeep

# What only one kind of transfer needs is imported when the first of that kind begins.


class KeepingGrid(BaseGrid):
    """The part of ``Grid`` that looks after files: checks, repairs and leases, of one or of many."""

    @started
    async def check(
        self,
        cap: str | Cap,
        *,
        verify: bool = False,
        add_lease: bool = False,
        progress: Progress | None = None,
    ) -> CheckResult:
        """
        Find out how many shares of a file are where.

        Args:
            cap: a read cap or verify cap of an immutable file or directory.
            verify: fetch every share and check every byte of it.
            add_lease: add a lease, or renew it, where a good share was found.
            progress: called with shares verified and shares found.

        Raises (through the Deferred):
            CapError: not the cap of an immutable file.
        """
        mutable = mutable_file(cap, directories=True)
        if mutable is not None:
            return await self._open_mutables().check(mutable, verify, add_lease)
        cap = checkable(cap)
        check_callable(progress, "progress")
        from pipegrid.transfer.upkeep.keeper import literal

        if isinstance(cap, LitCap):
            return literal(cap)
        await self._readiness.wait(cap.required_shares, all_told=True)
        return await self._keeper().check(cap, verify, add_lease, progress)

    def check_many(
        self,
        caps: Sequence[str | Cap],
        *,
        verify: bool = False,
        add_lease: bool = False,
        repair: bool = False,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[int, CheckResult | RepairResult | Failure], None] | None = None,
    ) -> Deferred[list[CheckResult | RepairResult | Failure]]:
        """
        Check many objects as one pipeline, each once; fires with each one's outcome.

        A thousand healthy objects take a few round trips: servers are asked about many in one message. An
        object that fails does not stop the others.

        Args:
            caps: read caps or verify caps of immutable files and directories.
            verify: fetch every share and check every byte of it; holds memory, and takes its time.
            add_lease: add a lease, or renew it, where a share was found.
            repair: make again what is missing of objects that are not healthy; what came of it is then the
                outcome. Those that cannot be restored stay as they are.
            bounds: how much at once.
            ended: called with the number of each cap, and its outcome, in the order of ending.
        """
        from pipegrid.transfer.upkeep.upkeep import Todo

        todo = Todo(verify=verify, add_lease=add_lease, repair=repair)
        return self._look_after(caps, todo, bounds, ended)

    def renew_many(
        self,
        caps: Sequence[str | Cap],
        *,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[int, RenewResult | Failure], None] | None = None,
    ) -> Deferred[list[RenewResult | Failure]]:
        """Add leases to every share of many objects, or renew them; see ``check_many`` and ``renew``."""
        from pipegrid.transfer.upkeep.upkeep import Todo

        return self._look_after(caps, Todo(renew=True), bounds, ended)

    def _look_after(
        self,
        caps: Sequence[str | Cap],
        todo: Todo,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[int, Any], None] | None = None,
    ) -> Deferred[list[Any]]:
        """Do with many objects what is to be done; see ``check_many`` and ``renew_many``."""
        from pipegrid.grid.upkeep import look_after

        return self._start(look_after(self._open_upkeep(todo, bounds), caps, ended))

    def upkeep(self, todo: Todo, bounds: UpkeepSettings | None = None) -> Deferred[Upkeep]:
        """
        Open what looks after objects that are not all known yet; whoever has it closes it.

        Args:
            todo: what is to be done with each.
            bounds: how much at once.

        Raises (through the Deferred):
            UnhappyError: there are no servers.
        """
        return self._start(self._open_upkeep(todo, bounds))

    async def _open_upkeep(self, todo: Todo, bounds: UpkeepSettings | None) -> Upkeep:
        from pipegrid.transfer.upkeep.upkeep import Upkeep

        kinds = UpkeepSettings, type(None)
        check_kind(bounds, kinds, "how much is looked after at once", "an UpkeepSettings")
        await self._readiness.wait(1, all_told=True)
        bounds = bounds or UpkeepSettings()
        return Upkeep(self._keeper(), self._download_settings, bounds, todo)

    def _keeper(self) -> Keeper:
        from pipegrid.transfer.upkeep.keeper import Keeper

        return Keeper(self._means, self._download_settings.silence_s, self._open_mutables)

    @started
    async def renew(self, cap: str | Cap) -> RenewResult:
        """
        Add a lease to every share of a file, or renew it; not a byte of them is read.

        Args:
            cap: a read cap or verify cap of an immutable file or directory.

        Raises (through the Deferred):
            CapError: not the cap of an immutable file.
        """
        mutable = mutable_file(cap, directories=True)
        if mutable is not None:
            return await self._open_mutables().renew(mutable)
        cap = checkable(cap)
        if isinstance(cap, LitCap):
            return RenewResult(cap, {}, 0, 0, [], [])
        await self._readiness.wait(cap.required_shares, all_told=True)
        return await self._keeper().renewal(cap).everywhere(self._peers)

    @started
    async def repair(
        self, cap: str | Cap, *, progress: Progress | None = None, force: bool = False
    ) -> RepairResult:
        """
        Check every byte of a file's shares, make those again that are missing or damaged, and renew leases.

        Good shares stay where they are. As many shares as can be found room for are made: ask the result.

        Args:
            cap: a read cap or verify cap of an immutable file or directory; the write cap of a mutable one,
                which is written anew, as the version that is best now.
            progress: called with acknowledged and total bytes of the shares that are made.
            force: of a mutable file, also where a newer version that cannot be read, or another one with the
                same number, is lost by it, or a newer one was seen before.

        Raises (through the Deferred):
            CapError: not the cap of an immutable file.
            NotEnoughSharesError: too few good shares are left.
            CorruptionError: the shares do not make up the file of the cap.
        """
        mutable = mutable_file(cap, directories=True)
        if mutable is not None:
            return await self._open_mutables().repair(mutable, force)
        cap = checkable(cap)
        check_callable(progress, "progress")
        if isinstance(cap, LitCap):
            from pipegrid.transfer.upkeep.keeper import literal

            healthy = literal(cap)
            return RepairResult(cap, healthy, healthy, {}, [], [], 0.0)
        from pipegrid.transfer.repair import Repair

        await self._readiness.wait(cap.required_shares, all_told=True)
        return await Repair(self._means, cap, self._download_settings, progress).run()
