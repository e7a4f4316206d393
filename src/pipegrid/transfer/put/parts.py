"""
What an upload is made of beside the file: who asks, who sends, and where it is written down what came of it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pipegrid.core.params import Geometry
from pipegrid.transfer.peers import Means, Peer, ring
from pipegrid.transfer.progress import PutReports
from pipegrid.transfer.put.allocations import Allocations
from pipegrid.transfer.put.asking import Asking
from pipegrid.transfer.put.elsewhere import Elsewhere
from pipegrid.transfer.put.fullservers import FullServers
from pipegrid.transfer.put.openlanes import OpenLanes
from pipegrid.transfer.put.plan import UploadPlan
from pipegrid.transfer.put.refusals import Refusals
from pipegrid.transfer.put.whereabouts import Whereabouts
from pipegrid.transfer.settings import UploadSettings


@attrs.frozen
class Parts:
    """
    The parts of one upload.

    Attributes:
        plan: what goes where.
        lanes: the shares that are on their way.
        allocations: questions for room, and their answers.
        refusals: servers that refused without a reason, and are asked what they have.
        asking: what is asked before anything is sent.
        where: what is stored.
    """

    plan: UploadPlan[Peer]
    lanes: OpenLanes
    allocations: Allocations
    refusals: Refusals
    asking: Asking
    where: Whereabouts


def new_parts(
    means: Means,
    *,
    storage_index: bytes,
    geometry: Geometry,
    share_bytes: int,
    happy: int,
    settings: UploadSettings,
    elsewhere: Elsewhere,
    full: FullServers,
    began_s: float,
    changed: Callable[[], None],
    reports: PutReports,
) -> Parts:
    """
    Return the parts of an upload that begins; its arguments are those of ``Upload``.

    Args:
        storage_index: decides the ring of servers.
        changed: called when there is news.
    """
    index, total = storage_index, geometry.total_shares
    secrets = means.secrets.for_file(index)
    servers = ring(index, means.peers)
    plan: UploadPlan[Peer] = UploadPlan(servers, total, happy, geometry.required_shares)
    allocations = Allocations(index, share_bytes, secrets, changed)
    return Parts(
        plan,
        OpenLanes(plan, settings.silence_s),
        allocations,
        Refusals(means.clock, index, share_bytes, changed, full),
        Asking(elsewhere, plan, allocations, share_bytes, began_s, settings.grace_s),
        Whereabouts(plan, total, share_bytes, reports.progress, reports.found),
    )
