"""
What all puts of one client work with, and what each leaves for those after it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pipegrid.transfer.peers import Means
from pipegrid.transfer.put.elsewhere import Elsewhere
from pipegrid.transfer.put.fullservers import FullServers
from pipegrid.transfer.put.overdue import Overdue
from pipegrid.transfer.settings import UploadSettings


@attrs.frozen(eq=False)
class PutMeans:
    """
    The means of puts.

    Attributes:
        grid: those of all transfers: servers, clock, workers, secrets.
        settings: how long stragglers, and silent servers, are waited for.
        elsewhere: whether files have been found where nobody would put them.
        full: servers that have no room.
        overdue: looks after small files that take too long.
        say: told, in a sentence, what the user should know beside the outcome.
    """

    grid: Means
    settings: UploadSettings
    elsewhere: Elsewhere
    full: FullServers
    overdue: Overdue
    say: Callable[[str], None]
