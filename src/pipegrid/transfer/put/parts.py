"""
What an upload is made of beside the file: who asks, who sends, and where it is written down what came of it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pipegrid.transfer.peers import Peer, ring
from pipegrid.transfer.progress import PutReports
from pipegrid.transfer.put.allocations import Allocations
from pipegrid.transfer.put.asking import Asking
from pipegrid.transfer.put.keyedfile import KeyedFile
from pipegrid.transfer.put.means import PutMeans
from pipegrid.transfer.put.openways import OpenWays
from pipegrid.transfer.put.plan import UploadPlan
from pipegrid.transfer.put.refusals import Refusals
from pipegrid.transfer.put.whereabouts import Whereabouts


@attrs.frozen
class Parts:
    """
    The parts of one upload.

    Attributes:
        plan: what goes where.
        ways: the shares that are on their way.
        allocations: questions for room, and their answers.
        refusals: servers that refused without a reason, and are asked what they have.
        asking: what is asked before anything is sent.
        where: what is stored.
    """

    plan: UploadPlan[Peer]
    ways: OpenWays
    allocations: Allocations
    refusals: Refusals
    asking: Asking
    where: Whereabouts


def new_parts(
    means: PutMeans,
    file: KeyedFile,
    began_s: float,
    changed: Callable[[], None],
    reports: PutReports,
) -> Parts:
    """
    Return the parts of an upload.

    Args:
        began_s: when it began.
        changed: called when there is news.
    """
    geometry, shares, settings = file.geometry, file.shares, means.settings
    servers = ring(shares.storage_index, means.grid.takers)
    plan: UploadPlan[Peer] = UploadPlan(
        servers, geometry.total_shares, file.happy, geometry.required_shares
    )
    allocations = Allocations(shares, changed)
    return Parts(
        plan,
        OpenWays(plan, settings.silence_s),
        allocations,
        Refusals(means.grid.clock, shares, changed, means.full),
        Asking(means.elsewhere, plan, allocations, shares, began_s, settings.grace_s),
        Whereabouts(plan, shares.share_bytes, reports.progress, reports.found),
    )
