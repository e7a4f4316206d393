"""
Sources as callers give them, opened for a put: what comes once is copied, and nobody waits for a silent one.
"""

from __future__ import annotations

import io
import os

from twisted.internet.interfaces import IReactorTime

from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.put.copied_source import copy_file
from pipegrid.transfer.put.source import (
    BytesSource,
    Source,
    SourceLike,
    UncopiedSource,
    cannot_read,
    open_at_once,
)


async def open_for_put(
    given: SourceLike, workers: CpuWorkers, clock: IReactorTime, most_bytes: int | None = None
) -> Source:
    """
    Return the source for what the caller gave, copied if it comes once.

    Args:
        most_bytes: of a copy.

    Raises:
        SourceError: it cannot be read, or there is no space for a copy.
        UsageError: it has more than ``most_bytes``, or is nothing of the kind.
    """
    if not isinstance(given, (bytes, bytearray, memoryview, str, os.PathLike)) and not hasattr(
        given, "read"
    ):
        # With Twisted's web client, which no file needs.
        from pipegrid.transfer.put.async_source import copy_streamed, is_streamed

        if is_streamed(given):
            return await copy_streamed(given, workers, clock, most_bytes)
    opened = await workers.run(open_at_once, given)
    if not isinstance(opened, UncopiedSource):
        return opened
    return await copy_unread(opened, workers, most_bytes)


async def copy_unread(
    unread: UncopiedSource, workers: CpuWorkers, most_bytes: int | None = None
) -> Source:
    """Return a copy of what can be read once; see ``open_for_put``."""
    if type(unread.file) is io.BytesIO:
        return BytesSource(unread.file.read(), unread.name)
    try:
        return await workers.run_blocking(copy_file, unread, most_bytes)
    except BaseException as error:
        if unread.owned:  # also if its turn never came
            unread.file.close()
        if isinstance(error, OSError):  # there is no thread for it
            raise cannot_read(unread.name, error) from error
        raise
