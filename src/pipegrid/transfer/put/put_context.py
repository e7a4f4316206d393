"""State shared by the puts of one client."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipegrid.reactor.deferreds import Deadlines
from pipegrid.transfer.peers import TransferContext
from pipegrid.transfer.put.ask_first_policy import PlacementHistory
from pipegrid.transfer.put.full_servers import FullServers
from pipegrid.transfer.settings import UploadSettings

# What all puts of one client share, and what each records for later puts.


class PutContext(NamedTuple):
    """
    What all puts of one client share.

    Attributes:
        grid: what all transfers share: servers, clock, workers, secrets.
        settings: how long to wait for stragglers and silent servers.
        history: whether shares have been found on servers where no put would place them.
        full: servers without space.
        overdue: notifies small files that take too long.
        say: gets a sentence that the user should know in addition to the result.
    """

    grid: TransferContext
    settings: UploadSettings
    history: PlacementHistory
    full: FullServers
    overdue: Deadlines
    say: Callable[[str], None]
