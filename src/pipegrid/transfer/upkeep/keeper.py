"""``Keeper``: one object looked after by itself, by the check of ``transfer.check``, and leases behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from pipegrid.core.caps import ChkCap, ChkVerifierCap, LitCap, MutableCap
from pipegrid.transfer.capacity import Capacity
from pipegrid.transfer.check import Check
from pipegrid.transfer.peers import Means
from pipegrid.transfer.progress import Progress
from pipegrid.transfer.renew import Renewal
from pipegrid.transfer.results import CheckResult, RenewResult, RepairResult


class KeepsMutable(Protocol):
    """What looks after one mutable file; a read cap is enough but for ``repair``."""

    async def check(self, cap: MutableCap, verify: bool, add_lease: bool) -> CheckResult:
        """Find out how many shares of the best version are where, as ``Keeper.check`` does."""

    async def repair(self, cap: MutableCap, force: bool) -> RepairResult:
        """Write the best version anew, unless all is well; ``CapError`` if the cap cannot write."""

    async def renew(self, cap: MutableCap) -> RenewResult:
        """Add leases to all shares, or renew them."""


@attrs.frozen
class Keeper:
    """
    What looking after objects needs.

    Attributes:
        silence_s: a server that gives no sign of life for so long counts as unreachable.
        mutables: returns what looks after files that can change.
        capacity: what servers have said of their space.
    """

    means: Means
    silence_s: float
    mutables: Callable[[], KeepsMutable]
    capacity: Capacity = attrs.field(init=False)

    @capacity.default
    def _(self) -> Capacity:
        return Capacity(self.means.clock)

    async def check(
        self,
        cap: ChkCap | ChkVerifierCap,
        verify: bool,
        add_lease: bool,
        progress: Progress | None = None,
    ) -> CheckResult:
        """
        Check one object, and add leases to its good shares if wanted.

        Raises:
            CapMismatch: the cap is not that of the object which is stored there.
        """
        check = Check(self.means, cap, verify, progress, self.silence_s, capacity=self.capacity)
        result = await check.run()
        if not add_lease:
            return result
        holders = {peer: None for peers in check.found.holders.values() for peer in peers}
        leased = await self.renewal(cap).on(holders)
        return attrs.evolve(
            result,
            renewed=sorted(peer.name for peer in leased.peers),
            lease_problems=sorted(set(leased.reasons)),
        )

    def renewal(self, cap: ChkCap | ChkVerifierCap) -> Renewal:
        """Return what renews the leases of one object."""
        return Renewal(self.means, cap, self.silence_s)


def literal(cap: LitCap) -> CheckResult:
    """Return how an object is that is in its cap: it cannot be lost while somebody has that."""
    return CheckResult(
        cap=cap,
        healthy=True,
        recoverable=True,
        good_shares={},
        corrupt=[],
        happiness=0,
        required_shares=0,
        total_shares=0,
        unreachable=[],
    )
