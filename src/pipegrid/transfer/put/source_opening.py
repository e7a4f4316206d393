"""Open the source that a caller gives for a put; a source that can be read only once is copied first."""

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
    Return the source for the object that the caller passed, copied if it can be read only once.

    Args:
        most_bytes: largest size of a copy.

    Raises:
        SourceError: the source cannot be read, or there is no space for a copy.
        UsageError: the source has more than ``most_bytes``, or is of no supported type.
    """
    if not isinstance(given, (bytes, bytearray, memoryview, str, os.PathLike)) and not hasattr(
        given, "read"
    ):
        # This import also loads Twisted's web client, which is not needed for files.
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
    """Return a copy of a source that can be read only once; see ``open_for_put``."""
    if type(unread.file) is io.BytesIO:
        return BytesSource(unread.file.read(), unread.name)
    try:
        return await workers.run_blocking(copy_file, unread, most_bytes)
    except BaseException as error:
        if unread.owned:  # close the file even if no thread has begun to copy it
            unread.file.close()
        if isinstance(error, OSError):  # no thread could be started
            raise cannot_read(unread.name, error) from error
        raise
