"""
Storing a file that has its key: in one move if it is small, else by an upload, and again where somebody else
is just storing the same.
"""

from __future__ import annotations

from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater

from pipegrid.errors import UnhappyError
from pipegrid.transfer.progress import PutReports
from pipegrid.transfer.put.begun import Begun
from pipegrid.transfer.put.keyedfile import KeyedFile
from pipegrid.transfer.put.means import PutMeans
from pipegrid.transfer.put.upload import Upload
from pipegrid.transfer.put.whole import put_whole
from pipegrid.transfer.results import PutResult

_CONTENTION_WAITS_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""
How long to wait, time after time, where happiness fails because somebody else is just uploading the
same shares: when they are done, these are found in place.
"""


async def store(means: PutMeans, file: KeyedFile, reports: PutReports) -> PutResult:
    """
    Store a file.

    Raises:
        UnhappyError: it could not be spread over enough servers.
        SourceError: the source could not be read, or changed.
    """
    await means.full.check(means.grid, file)
    stored = await put_whole(means, file, reports)
    if not isinstance(stored, PutResult):
        stored = await _upload(means, file, reports, stored)
    means.full.took(stored.shares_placed.values())
    wanted = min(file.geometry.total_shares, sum(peer.takes_uploads for peer in means.grid.peers))
    means.grid.shortfall.note(stored.happiness, wanted, stored.reasons)
    return stored


async def _upload(
    means: PutMeans, file: KeyedFile, reports: PutReports, begun: Begun | None
) -> PutResult:
    """Upload it, and again if somebody else does just now."""
    for wait_s in (*_CONTENTION_WAITS_S, None):
        upload = Upload(means, file, reports, begun)
        begun = None
        try:
            return await upload.run()
        except UnhappyError:
            if not upload.contended or wait_s is None:
                raise
        except CancelledError:
            _say_what_is_lost(means, file)
            raise
        await deferLater(means.grid.clock, wait_s)
    raise AssertionError("the last round returns or raises")


def _say_what_is_lost(means: PutMeans, file: KeyedFile) -> None:
    """A put was cut off; over Foolscap unfinished shares go with the connection."""
    peers = means.grid.peers
    forgetful = sum(peer.protocol == "foolscap" for peer in peers)
    if forgetful and file.geometry.num_segments > 1:
        means.say(
            f"an interrupted put starts again on {forgetful} of {len(peers)} servers: they are "
            "spoken to over Foolscap, where unfinished shares are gone with the connection"
        )
