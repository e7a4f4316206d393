"""One object looked after by itself: the check that ``transfer.check`` makes, and the leases behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.caps import ChkCap, ChkVerifierCap, LitCap, MutableCap
from pipegrid.core.leases import ClientSecrets
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.check import Check
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.progress import Progress
from pipegrid.transfer.renew import Renewal
from pipegrid.transfer.results import CheckResult, RenewResult, RepairResult


class KeepsMutable(Protocol):
    """What looks after one mutable file; a read cap is enough but for ``repair``."""

    async def check(self, cap: MutableCap, verify: bool, add_lease: bool) -> CheckResult:
        """See ``Keeper.check``."""

    async def repair(self, cap: MutableCap, force: bool) -> RepairResult:
        """Write the best version anew, unless all is well; ``CapError`` if the cap cannot write."""

    async def renew(self, cap: MutableCap) -> RenewResult:
        """Add leases to all shares, or renew them."""


@attrs.frozen(kw_only=True)
class Keeper:
    """
    What looking after objects needs.

    Attributes:
        peers: servers that may be asked, in any order; it may change.
        silence_s: a server that gives no sign of life for so long counts as unreachable.
        mutables: returns what looks after files that can change.
    """

    clock: IReactorTime
    workers: CpuWorkers
    peers: Sequence[Peer]
    client_secrets: ClientSecrets
    silence_s: float
    mutables: Callable[[], KeepsMutable]

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
        check = Check(
            clock=self.clock,
            workers=self.workers,
            peers=self.peers,
            cap=cap,
            verify=verify,
            progress=progress,
            silence_s=self.silence_s,
        )
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
        return Renewal(
            clock=self.clock,
            cap=cap,
            client_secrets=self.client_secrets,
            silence_s=self.silence_s,
        )


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
