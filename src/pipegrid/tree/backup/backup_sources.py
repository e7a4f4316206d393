"""What one run of a backup stores: a directory, several directories, or the output of a program."""

from __future__ import annotations

import io
import os
import stat
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from pipegrid.core.caps import ChkCap, LitCap
from pipegrid.core.packed_directory import PackedChild, directory_cap, pack_immutable
from pipegrid.core.text import printable
from pipegrid.errors import SourceError, UsageError
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.blocking_calls import BlockingCall
from pipegrid.transfer.put.rereadable_source import open_for_put
from pipegrid.transfer.put.source import Source, SourceLike, as_repeatable
from pipegrid.tree.file_metadata import entry_metadata, entry_name
from pipegrid.tree.file_selection import TreeSelection
from pipegrid.tree.joined_walk import JoinedWalk
from pipegrid.tree.local_walk import EntryWalk, LinkId, LocalWalk
from pipegrid.tree.retry_queue import with_retries
from pipegrid.tree.tree_upload import FileProgress, TreeCounts, TreeReports, TreeResult
from pipegrid.tree.upload_target import KnownObjects

END_S = 2.0
"""How long a command has to end after it was asked to, before it is killed. Nothing else runs meanwhile."""

BETWEEN = ", "
"""Separates the directories of one run in the catalogue."""

MAX_ROOT_BYTES = 4096
"""Of several directories, as many as fit are named in the catalogue, whose entries are bounded."""


class BackupDirectories:
    """
    The directories of one run.

    The tree of one directory has its content at the root. That of several has each at its absolute path, as
    restic and borg store them, so names cannot collide. One that is inside another is part of it; if it is
    mounted there, it is stored even if what else is mounted is not.

    Args:
        given: paths; what is a link is followed.

    Attributes:
        walked: absolute paths without links, none below another.
        selected: the same, except that a single one is as it was given.
        base: the directory whose content is at the root of the tree.
        name: the default name of the backup.
        root: the text that the catalogue has for them.
    """

    def __init__(self, given: Sequence[str]) -> None:
        real = sorted({os.path.realpath(each) for each in given}, key=lambda each: each.split("/"))
        self.walked: list[str] = []
        self._inside: dict[str, list[str]] = {}
        for each in real:
            above = next((path for path in self.walked if _is_inside(each, path)), None)
            if above is None:
                self.walked.append(each)
            else:
                relative = each[len(above.rstrip("/")) + 1 :]
                self._inside.setdefault(above, []).append(relative)
        self.selected = [given[0]] if len(given) == 1 else self.walked
        self.is_one = len(self.walked) == 1
        self.base = self.walked[0] if self.is_one else "/"
        names = (os.path.basename(os.path.abspath(each)) or "root" for each in self.selected)
        self.name = "+".join(names)
        self.root = _root_of(self.walked)

    @property
    def title(self) -> str:
        """The directories as they were given, for messages."""
        return BETWEEN.join(self.selected)

    def walk(
        self,
        selection: Callable[[str], TreeSelection],
        know: Callable[[str, os.stat_result], Any],
        link_id: LinkId,
        **options: Any,
    ) -> EntryWalk:
        """
        Return a walk through them.

        Args:
            selection: called with each directory.
            know, link_id: called with paths relative to ``base``.
            options: of ``LocalWalk``.
        """
        if self.is_one:
            inside = self._inside.get(self.base, ())
            (directory,) = self.selected
            chosen = selection(directory)
            return LocalWalk(
                directory, selection=chosen, know=know, link_id=link_id, mounted=inside, **options
            )

        def walk_of(directory: str, prefix: str, levels_above: int) -> LocalWalk:
            return LocalWalk(
                directory,
                selection=selection(directory),
                know=lambda path, found: know(f"{prefix}/{path}", found),
                link_id=lambda found, path: link_id(found, f"{prefix}/{path}"),
                mounted=self._inside.get(directory, ()),
                levels_above=levels_above,
                **options,
            )

        return JoinedWalk(self.walked, walk_of)


def _root_of(paths: Sequence[str]) -> str:
    """Return the text for directories in the catalogue."""
    size, count = 0, 0
    for count, path in enumerate(paths):
        size += len(os.fsencode(path)) + len(BETWEEN)
        if count and size > MAX_ROOT_BYTES:
            return f"{BETWEEN.join(paths[:count])} and {len(paths) - count} more"
    return BETWEEN.join(paths)


def _is_inside(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def still_exists(root: str) -> bool:
    """Return whether what the catalogue calls this exists, at least in part; ``root`` is of such a source."""
    if not root.startswith("/"):
        return True  # the output of a program
    separated = BETWEEN + "/"
    return any(map(os.path.exists, (root, *root.replace(separated, "\0/").split("\0"))))


class BackupStream:
    """
    The one file of a run, which is read once: standard input, or the output of a command.

    It is copied to temporary space until it ends, and only then stored: so a command that fails, and a stream
    without a single byte, store nothing, and servers that are unreachable for a while need no second reading.

    Args:
        name: of the file.
        source: an open file; or the arguments of a command, its program first.

    Attributes:
        name: also the default name of the backup.
        root: the text that the catalogue has for it; without arguments, which may hold secrets.

    Raises:
        UsageError: no file can have this name.
    """

    def __init__(self, name: str, source: BinaryIO | Sequence[str]) -> None:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise UsageError(f"'{printable(name)}' is not the name of a file; give one without '/'")
        self.name = name
        self._file: BinaryIO | None = None
        self._command: Sequence[str] = ()
        if isinstance(source, Sequence):
            self._command = source
            self.root = f"the output of {printable(source[0])}"
        else:
            self._file = source
            self.root = "standard input"

    async def store(
        self, grid: Grid, reports: TreeReports, now: Callable[[], float], memory: KnownObjects
    ) -> TreeResult:
        """
        Read it to its end, and store it as the only file of a directory.

        Args:
            now: seconds since 1970.
            memory: records what is sent and stored.

        Raises:
            SourceError: it cannot be read, is empty, or the command failed; nothing is stored.
            GridError: the grid accepts nothing.
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
        found = _status_at(now(), source.size)
        name, exact = entry_name(os.fsencode(self.name))
        entry = PackedChild(name, cap, entry_metadata(found(stat.S_IFREG | 0o600), name=exact))
        packed = pack_immutable([entry])
        whole = TreeCounts(bytes=len(packed))
        root = await _put(grid, packed, whole, TreeReports(), memory)
        counts.sent_directories = int(not isinstance(root, LitCap))
        counts.sent_bytes += whole.sent_bytes
        counts.already_stored += whole.already_stored
        metadata = entry_metadata(found(stat.S_IFDIR | 0o700))
        return TreeResult(directory_cap(root), metadata, counts, grid.clock.seconds() - began_s)

    async def _read(self, grid: Grid) -> Source:
        if self._file is not None:
            return await open_for_put(self._file, grid.workers, grid.clock)
        program = printable(self._command[0])
        try:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise SourceError(f"cannot run {program}: {why}") from error
        assert process.stdout is not None
        source: Source | None = None
        try:
            # Its type is known to what can stop reading when the run is cancelled.
            assert isinstance(process.stdout, io.BufferedReader)
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
    """Store a file, and count it."""
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


def _status_at(now_s: float, size: int) -> Callable[[int], os.stat_result]:
    """Return a function that makes the status of a file or directory of this user, made at a time."""
    times = {"st_mtime": now_s, "st_mtime_ns": int(now_s * 1e9)}

    def status(mode: int) -> os.stat_result:
        whole = (int(now_s),) * 3
        return os.stat_result((mode, 0, 0, 1, os.getuid(), os.getgid(), size, *whole), times)

    return status


def _wait(call: BlockingCall, process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a program that has closed its output; returns its status."""
    while process.poll() is None:
        call.sleep(0.02)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """
    End a program that is still running, since the run was cancelled or cannot go on.

    It is not left to a thread: a cancelled run that is cancelled once more would drop what has not begun.
    """
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
