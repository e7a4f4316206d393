"""What came of many objects, counted; pure."""

from __future__ import annotations

from collections import Counter

import attrs
from twisted.python.failure import Failure

from pipegrid.transfer.results import CheckResult, FileHealth, RenewResult, RepairResult
from pipegrid.transfer.upkeep.upkeep import UpkeepOutcome


@attrs.define
class UpkeepSummary:
    """
    How many objects are how.

    Attributes:
        objects: all of them; each is in one of the next eight.
        healthy: nothing is missing; of renewals: all shares that were found have a lease.
        repaired: something was missing, and has been made again.
        damaged: something is missing, and the object can be restored.
        reachable: what is missing may all be on servers that are down, and nothing else is wrong.
        unspread: nothing is missing, but more servers could have shares.
        lost: it cannot be restored.
        leaseless: healthy, but some shares have got no lease.
        failed: nothing can be said of it, because of an error.
        literal: of the healthy ones, those that are in their caps.
        shares_made: by repairs.
        good_shares: that were found; of renewals, those with a lease.
        wanted_shares: that all objects together have if nothing is missing.
        unreachable: nickname of a server that could not be asked to the number of objects that it was to be
            asked about.
    """

    objects: int = 0
    healthy: int = 0
    repaired: int = 0
    damaged: int = 0
    reachable: int = 0
    unspread: int = 0
    lost: int = 0
    leaseless: int = 0
    failed: int = 0
    literal: int = 0
    shares_made: int = 0
    good_shares: int = 0
    wanted_shares: int = 0
    unreachable: Counter[str] = attrs.field(factory=Counter)

    def note(self, outcome: UpkeepOutcome) -> None:
        """Count one more object by its outcome; a Failure counts as ``failed``."""
        self.objects += 1
        if isinstance(outcome, Failure):
            self.failed += 1
        elif isinstance(outcome, RepairResult):
            self._note_repair(outcome)
        else:
            self.unreachable.update(outcome.unreachable)
            self.literal += not outcome.total_shares
            self.wanted_shares += outcome.total_shares
            if isinstance(outcome, CheckResult):
                self._note_check(outcome)
            else:
                self._note_renewal(outcome)

    def _note_check(self, outcome: CheckResult) -> None:
        self.good_shares += len(outcome.good_shares)
        if not self._note_state(outcome.state):
            if outcome.lease_problems:
                self.leaseless += 1
            else:
                self.healthy += 1

    def _note_state(self, state: FileHealth) -> bool:
        """Count what is not healthy by its state; returns whether it is counted."""
        if state in ("lost", "unavailable"):
            self.lost += 1
        elif state == "reachable":
            self.reachable += 1
        elif state == "unspread":
            self.unspread += 1
        elif state == "damaged":
            self.damaged += 1
        return state != "healthy"

    def _note_renewal(self, outcome: RenewResult) -> None:
        self.good_shares += len(outcome.leases)
        if not outcome.recoverable:
            self.lost += 1
        elif outcome.reasons or outcome.unreachable:
            self.leaseless += 1
        else:
            self.healthy += 1

    def _note_repair(self, outcome: RepairResult) -> None:
        self.unreachable.update(outcome.after.unreachable)
        self.literal += not outcome.after.total_shares
        self.wanted_shares += outcome.after.total_shares
        self.good_shares += len(outcome.after.good_shares)
        self.shares_made += len(outcome.uploaded)
        if not outcome.whole:
            self._note_state(outcome.after.state)
        elif outcome.uploaded:
            self.repaired += 1
        else:
            self.healthy += 1
