"""
Files on their way back from a grid.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from io import BytesIO

from pipegrid.arguments import check_callable, check_whole
from pipegrid.core.caps import Cap, ChkCap, LitCap
from pipegrid.core.filecaps import mutable_file, readable
from pipegrid.disk.partfile import PartFile
from pipegrid.errors import NotEnoughSharesError, SinkError, UsageError
from pipegrid.grid.base import BaseGrid, started
from pipegrid.reactor.wakeup import Wakeup
from pipegrid.transfer.get.blocking_sink import is_pipe_or_device, open_pipe_or_device
from pipegrid.transfer.get.sink import SinkLike, open_sink
from pipegrid.transfer.progress import Progress
from pipegrid.transfer.results import GetResult

# What only one kind of transfer needs is imported when the first of that kind begins.


class FetchingGrid(BaseGrid):
    """The part of ``Grid`` that fetches files: ``get`` and ``read``."""

    @started
    async def get(
        self,
        cap: str | Cap,
        sink: SinkLike | str | os.PathLike[str],
        *,
        start: int = 0,
        length: int | None = None,
        progress: Progress | None = None,
        replace: bool = False,
    ) -> GetResult:
        """
        Fetch a file, or a range of it; fires when the last verified byte is in the sink.

        Args:
            cap: a file's read cap.
            sink: a path, a binary file object (it stays open), or an ``IConsumer``, which may pause us. A
                pipe, a device, or a file object of another kind than a regular file's is written to in a
                thread, one write at a time. At a path the file appears when it is whole, and durable. If
                that is interrupted, a hidden part stays beside it, and the next get to the same path goes
                on with what of it is good.
            start, length: the range; by default all. A length beyond the end stops there.
            progress: called with bytes delivered and wanted; what was there already is delivered.
            replace: a file that is at the path already.

        Raises (through the Deferred):
            CapError: not a cap that reads a file.
            UsageError: the range begins beyond the end of the file.
            NotEnoughSharesError: too few good shares could be had.
            CorruptionError: the shares do not make up the file of the cap.
            SinkError: the sink could not take it, its reader has gone, there is a file at the path, or
                somebody writes to it.
        """
        with ExitStack() as stack:
            if isinstance(sink, str | os.PathLike):
                if mutable_file(cap) is None:
                    readable(cap)  # before anything is done on the disk
                path = _checked_path(sink)
                if is_pipe_or_device(path):
                    sink = await open_pipe_or_device(path, self._workers)
                    stack.callback(sink.close)
                else:
                    sink = stack.enter_context(PartFile(path, replace))
            result = await self._get(cap, sink, start, length, progress)
            if isinstance(sink, PartFile):
                await self._workers.run(sink.publish)
            return result

    async def _get(
        self,
        given: str | Cap,
        sink: SinkLike,
        start: int,
        length: int | None,
        progress: Progress | None,
    ) -> GetResult:
        mutable = mutable_file(given)
        if mutable is not None:
            return await self._open_mutables().get(mutable, sink, start, length, progress)
        cap = readable(given)
        check_callable(progress, "progress")
        length = _checked_length(cap.size, start, length)
        if isinstance(cap, LitCap) or length == 0:
            return await self._give(cap, sink, start, length)
        await self._readiness.wait(cap.required_shares)
        from pipegrid.transfer.get.download import Download

        delivered = False

        def note(done: int, total: int) -> None:
            nonlocal delivered
            delivered = delivered or done > 0
            if progress is not None:
                progress(done, total)

        def download() -> Download:
            return Download(
                self._means,
                cap=cap,
                sink=sink,
                start=start,
                length=length,
                settings=self._download_settings,
                progress=note,
                earlier=self._earlier,
            )

        first = download()
        try:
            return await first.run()
        except NotEnoughSharesError:
            if delivered or first.handed_on or not await self._readiness.more_servers():
                raise
        return await download().run()

    async def _give(
        self, cap: ChkCap | LitCap, sink: SinkLike, start: int, length: int
    ) -> GetResult:
        """Hand on a part of what the cap itself holds, or of nothing: no server is asked."""
        if isinstance(sink, PartFile):
            sink.begin(0)
        wanted = Wakeup(self._reactor)
        target = open_sink(sink, wanted.fire, self._workers)
        try:
            if isinstance(cap, LitCap):
                target.write([cap.data[start : start + length]])
            while target.pending_bytes:
                await wanted.wait()
                target.check()
            await target.flushed()
        finally:
            target.finish()
        return GetResult(length, {}, [])

    @started
    async def read(self, cap: str | Cap, start: int = 0, length: int | None = None) -> bytes:
        """Fetch a file, or a range of it, into memory; see ``get``."""
        into = BytesIO()
        await self._get(cap, into, start, length, None)
        return into.getvalue()


def _checked_path(path: str | os.PathLike[str]) -> str:
    """
    Raises:
        SinkError: no file can have this name.
    """
    name = os.fspath(path)
    if not name or "\0" in name:
        raise SinkError(f"{name!r} is no path of a file; give another")
    return name


def _checked_length(size: int, start: int, length: int | None) -> int:
    """
    Return how many bytes of a file a range has; ``length``: that were asked for.

    Raises:
        UsageError: it is no range of it.
    """
    check_whole(start, "the beginning of a range")
    if length is not None:
        check_whole(length, "the length of a range")
    if start < 0 or start > size:
        raise UsageError(f"the range begins at byte {start}, but the file has {size} bytes")
    if length is not None and length < 0:
        raise UsageError(f"a range cannot have {length} bytes")
    return size - start if length is None else min(length, size - start)
