"""The job of ``mirror list``, which loads a reactor only if it needs one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

from pipegrid.cli.command_job import GridJob, ReactorJob
from pipegrid.cli.error_report import Interrupted, unreadable
from pipegrid.cli.mirror_options import MirrorOptions, MirrorProgress, print_outcome, store
from pipegrid.errors import SourceError, UsageError
from pipegrid.mirror import (
    destination,
    fetch_run,
    file_list_format,
    local_check,
    manifest,
    preconnect_mirrors,
)

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from pipegrid.cli.console import Console
    from pipegrid.grid import Grid
    from pipegrid.mirror.archive_file import ArchiveFile


def list_job(file: str, dest: str, jobs: int, fetching: MirrorOptions) -> ReactorJob | GridJob:
    """Return the job of ``mirror list``."""
    run = ListRun(file, dest, fetching, jobs)
    return fetching.job(run.run_on_epoll, run.run)


class ListRun:
    """One run of ``mirror list``; ``file`` is the list's path, ``jobs`` how many processes share the work."""

    def __init__(self, file: str, dest: str, fetching: MirrorOptions, jobs: int = 1) -> None:
        self._file = file
        self._dest = dest
        self._fetching = fetching
        self._jobs = min(jobs, fetching.connections)
        self._begun: fetch_run.MirrorRun | None = None
        self._looked: tuple[int, int] | None = None

    def run_on_epoll(self, console: Console, stopped: Callable[[], bool]) -> int | None:
        """
        Work without a reactor; return the exit status, or None if ``run`` must do all or the rest of the
        work.
        """
        fetching = self._fetching
        addresses = fetching.direct_addresses(console)
        if addresses is None:
            return None
        with ExitStack() as stack:
            source = stack.enter_context(self._open())
            self._check_deleting(source)
            target = fetching.destination(console, self._dest, stopped)
            if target is not None:
                stack.callback(target.close)
            # The number of connections is an estimate, since the missing files are not known yet.
            each = preconnect_mirrors.connections_for(
                self._file, self._dest, fetching.connections // self._jobs
            )
            preconnected = stack.enter_context(closing(fetching.dial(addresses, each)))
            # The modules that the following lines use are imported while connections are being made.

            display = stack.enter_context(MirrorProgress(console))
            if target is None:
                target = destination.Destination(self._dest)
                stack.callback(target.close)
            work = fetch_run.MirrorRun(
                target,
                addresses,
                local_check.VerifyPolicy(fetching.paranoid, fetching.sample_share),
            )
            if not work.run_on_epoll(
                manifest.noting(target, self._all(source, console)),
                fetching.durability,
                fetching.connections,
                stopped,
                display.show if console.shows_progress else None,
                self._jobs,
                preconnected,
            ):
                if stopped():
                    raise Interrupted
                self._begun = work
                stack.pop_all()  # keeps the destination open for ``run``
                source.close()
                preconnected.close()
                return None
            work.finish()
            report = work.sum_up()
            removed = self._keep(source, target) if not report.failed_files else []
            return print_outcome(console, fetching, self._dest, report, removed, target.changes)

    def _keep(self, source: BinaryIO, target: destination.Destination) -> list[str]:
        """
        Record that all files of the list exist; with ``--delete``, remove other files. Return the paths of
        the removed files.
        """

        if self._fetching.delete:
            self._check_same(source)
        manifest.keep_manifest(target)
        if not self._fetching.delete:
            return []
        return target.delete_others(each.path for each in manifest.read_manifest(target))

    async def run(self, reactor: Any, console: Console, grid: Grid | None = None) -> int:
        """Do the work, or the rest of the work that ``run_on_epoll`` began."""

        fetching = self._fetching
        work = self._begun
        with self._open() as source:
            if work is None:
                self._check_deleting(source)
            async with fetching.mirror(
                reactor, console, self._dest if work is None else work.destination
            ) as (mirror, _):
                target = mirror.destination
                if work is not None:
                    report = await mirror.finish(work)
                elif fetching.dry_run:
                    report = await mirror.sync(self._entries(source))
                else:
                    report = await mirror.sync(manifest.noting(target, self._entries(source)))
                removed: list[str] = []
                if not report.failed_files:
                    kept = self._entries(source)
                    if not fetching.dry_run:
                        if fetching.delete:
                            self._check_same(source)
                        await mirror.run(manifest.keep_manifest, target)
                        kept = manifest.read_manifest(target)
                    if fetching.delete:
                        removed = await mirror.delete_others(
                            (each.path for each in kept), fetching.dry_run
                        )
                further = await store(mirror, grid, report, fetching)
        return print_outcome(
            console, fetching, self._dest, report, removed, target.changes, **further
        )

    def _open(self) -> BinaryIO:
        try:
            return self._looked_at(open(self._file, "rb"))
        except OSError as error:
            raise unreadable(self._file, error) from error

    def _looked_at(self, source: BinaryIO) -> BinaryIO:
        """
        Return the open list; the first time, also record its size and modification time.

        Raises:
            UsageError: the list can be read only once, like a pipe, but some runs read it twice.
        """
        if not source.seekable():
            source.close()
            raise UsageError(
                f"{self._file} can be read only once, and a list is read several times; write it to a file"
            )
        if self._looked is None:
            self._looked = _look_of(source)
        return source

    def _check_same(self, source: BinaryIO) -> None:
        """
        Check that the list has not changed since it was first opened.

        Raises:
            SourceError: the list has changed, perhaps because another program is writing it.
        """
        if _look_of(source) != self._looked:
            raise SourceError(
                f"{self._file} was changed while it was read, so nothing was deleted; run the command again"
            )

    def _check_deleting(self, source: BinaryIO) -> None:
        """
        Check that ``--delete`` would not remove too much.

        Raises:
            UsageError: the list is empty, so that everything would be removed; or the files in the
                destination are not the mirror's.
        """
        fetching = self._fetching
        fetching.check_deleting(self._dest)
        deletes = fetching.delete and not fetching.dry_run
        if deletes and next(self._entries(source), None) is None:
            raise UsageError(
                f"{self._file} names no files, and --delete would remove everything in {self._dest}; check "
                "the program that wrote the list"
            )

    def _all(self, source: BinaryIO, console: Console) -> Iterator[ArchiveFile]:
        """
        Yield the files in the list; after the last file, load the modules that print the results, while
        responses are outstanding.
        """
        yield from self._entries(source)
        console.get_ready()

    def _entries(self, source: BinaryIO) -> Iterator[ArchiveFile]:
        """Yield the files in the list, which is read again from its beginning."""

        source.seek(0)
        yield from file_list_format.read_list(file_list_format.lines_of(source), self._file)


def _look_of(source: BinaryIO) -> tuple[int, int]:
    status = os.fstat(source.fileno())
    return status.st_size, status.st_mtime_ns
