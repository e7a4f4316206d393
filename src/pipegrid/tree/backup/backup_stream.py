"""A backup of one file that is read once: standard input, or the output of a program."""

from __future__ import annotations

import io
import os
import stat
import subprocess
from collections.abc import Callable, Sequence
from typing import BinaryIO

from pipegrid.core.caps import ChkCap, LitCap
from pipegrid.core.packed_directory import PackedChild, directory_cap, pack_immutable
from pipegrid.core.text import printable
from pipegrid.errors import SourceError, UsageError
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.workers import BlockingCall
from pipegrid.transfer.put.source import Source, SourceLike, as_repeatable
from pipegrid.transfer.put.source_opening import open_for_put
from pipegrid.tree.file_metadata import entry_metadata, entry_name
from pipegrid.tree.retry_queue import with_retries
from pipegrid.tree.tree_upload import FileProgress, TreeCounts, TreeReports, TreeResult
from pipegrid.tree.upload_store import KnownObjects

END_S = 2.0
"""Seconds that a command has to end after SIGTERM before it is killed. The reactor is blocked meanwhile."""


class BackupStream:
    """
    The one file of a run, which is read once: standard input, or the output of a command.

    The stream is copied to temporary space until it ends, and only then stored. So nothing is stored if the
    command fails or the stream is empty, and retries need not read the stream again.

    Args:
        name: the name of the file.
        source: an open file; or the arguments of a command, starting with its program.

    Attributes:
        name: also the default name of the backup.
        root: the text that the catalogue has for the stream; without the command's arguments, which may be
            secret.

    Raises:
        UsageError: a file cannot have this name.
    """

    def __init__(self, name: str, source: BinaryIO | Sequence[str]) -> None:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise UsageError(f"'{printable(name)}' is not the name of a file; give one without '/'")
        self.name = name
        self._source = source
        self.root = "standard input"
        if isinstance(source, Sequence):
            self.root = f"the output of {printable(source[0])}"

    async def store(
        self, grid: Grid, reports: TreeReports, now: Callable[[], float], memory: KnownObjects
    ) -> TreeResult:
        """
        Read the stream to its end, and store it as the only file of a directory.

        Args:
            now: returns the seconds since 1970.
            memory: records what is sent and stored.

        Raises:
            SourceError: the stream cannot be read or is empty, or the command failed; nothing is stored.
            GridError: the grid accepts no objects.
        """
        began_s = grid.clock.seconds()
        source = await self._read(grid)
        try:
            if not source.size:
                raise SourceError(
                    f"{self.root} is empty, so nothing is stored; a program may have failed"
                )
            counts = TreeCounts(files=1, directories=1, bytes=source.size)
            cap = await _put(grid, as_repeatable(source), counts, reports, memory)
        finally:
            source.close()
        counts.sent_files = int(not isinstance(cap, LitCap))
        now_s = now()
        name, exact = entry_name(os.fsencode(self.name))
        entry = PackedChild(
            name, cap, entry_metadata(_status(stat.S_IFREG | 0o600, now_s), name=exact)
        )
        packed = pack_immutable([entry])
        whole = TreeCounts(bytes=len(packed))
        root = await _put(grid, packed, whole, TreeReports(), memory)
        counts.sent_directories = int(not isinstance(root, LitCap))
        counts.sent_bytes += whole.sent_bytes
        counts.already_stored += whole.already_stored
        metadata = entry_metadata(_status(stat.S_IFDIR | 0o700, now_s))
        return TreeResult(directory_cap(root), metadata, counts, grid.clock.seconds() - began_s)

    async def _read(self, grid: Grid) -> Source:
        if not isinstance(self._source, Sequence):
            return await open_for_put(self._source, grid.workers, grid.clock)
        program = printable(self._source[0])
        try:
            process = subprocess.Popen(
                self._source, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise SourceError(f"cannot run {program}: {why}") from error
        # A ``BufferedReader`` can be stopped in a read when the run is cancelled.
        assert isinstance(process.stdout, io.BufferedReader)
        source: Source | None = None
        try:
            source = await open_for_put(process.stdout, grid.workers, grid.clock)
            status = await grid.workers.run_blocking(_wait, process)
            if status:
                how = f"status {status}" if status > 0 else f"signal {-status}"
                raise SourceError(f"{program} ended with {how}, so nothing is stored")
        except BaseException:
            if source is not None:
                source.close()
            raise
        finally:
            process.stdout.close()
            _end(process)
        return source


async def _put(
    grid: Grid, source: SourceLike, counts: TreeCounts, reports: TreeReports, memory: KnownObjects
) -> ChkCap | LitCap:
    """Store a file, and add it to the counts."""
    sending = FileProgress(reports, counts, counts.bytes)
    try:
        result = await with_retries(
            grid.clock,
            lambda: grid.put(source, progress=sending.is_at, cap_known=memory.sending),
        )
    finally:
        sending.end()
    if isinstance(result.cap, ChkCap):
        memory.checked(result.cap)
    counts.sent_bytes += 0 if isinstance(result.cap, LitCap) else counts.bytes
    counts.already_stored += bool(result.shares_found) and not result.shares_placed
    reports.progress(counts)
    return result.cap


def _status(mode: int, now_s: float) -> os.stat_result:
    """
    Return a status with the fields that metadata needs, for a file or directory that this user made at
    ``now_s``.
    """
    times = {"st_mtime": now_s, "st_mtime_ns": int(now_s * 1e9)}
    return os.stat_result((mode, 0, 0, 1, os.getuid(), os.getgid(), 0, 0, 0, 0), times)


def _wait(call: BlockingCall, process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a program that has closed its output; return its exit status."""
    while process.poll() is None:
        call.sleep(0.02)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """
    End the program if it is still running, because the run was cancelled or has failed.

    This blocks the reactor instead of using a thread: if the run is cancelled a second time, a thread that
    has not begun would be dropped.
    """
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
