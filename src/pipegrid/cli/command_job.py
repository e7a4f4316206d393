"""
The job of a parsed command line, ready to be run.

Commands return a job instead of doing it: jobs with a grid need a running reactor, which the process (or a
test) provides.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, Interrupted, UnprintedCap, sentence
from pipegrid.disk import private_files
from pipegrid.errors import SinkError
from pipegrid.grid import client_paths, user_grids
from pipegrid.reactor import trace
from pipegrid.transfer import settings
from pipegrid.tree import grid_paths

TYPE_CHECKING = False  # as in ``typing``, which is slow to import
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from twisted.internet.defer import Deferred

    from pipegrid.flow.rate_timetable import RateLimit
    from pipegrid.tree.tree_grid import Grid

OpenGrid = Callable[..., "Deferred[Grid]"]


class Invocation:
    """
    The values of the global options.

    Attributes:
        base_directory: of the client's configuration; None: the user's own.
        grid: the name of one of the grids that this directory names in ``[grids]``; None: its own.
        trace: where to write a trace of all operations, or None.
        wait_for: how many servers must respond before work begins; 0: as soon as enough are known.
        max_segment_bytes: files with larger segments are not fetched; None: the default.
        limit_rate: over all connections; None: no limit.
        jobs: files at the same time; None: as many as memory and windows allow.
        max_memory_bytes: of data; None: the default.
        places: where the values of options are written, if they are from a section of ``pipegrid.cfg``; by
            the names of parameters. None: from no section.
        run_job: runs a job while the command line is still being parsed, once; None if that is impossible.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.base_directory: str | None = None
        self.grid: str | None = None
        self.trace: str | None = None
        self.wait_for = 0
        self.max_segment_bytes: int | None = None
        self.limit_rate: RateLimit | None = None
        self.jobs: int | None = None
        self.max_memory_bytes: int | None = None
        self.places: Mapping[str, str] | None = None
        self.run_job: Callable[[GridJob, Invocation], int] | None = None

    @property
    def directory(self) -> str | None:
        """
        The directory of the grid that is meant; None: the user's own.

        Raises:
            UsageError: it is one of several grids, and there is none of this name.
        """
        if self.grid is None:
            return self.base_directory
        return str(user_grids.grid_directory(self.own_directory, self.grid))

    @property
    def own_directory(self) -> Path:
        """The client's directory, which may name further grids."""
        return client_paths.own_directory(self.base_directory)

    @property
    def grid_directory(self) -> Path:
        """The directory of the grid that is meant, which may not exist; raises as ``directory``."""
        return client_paths.own_directory(self.directory)


class OfflineJob:
    """Work that needs no grid."""

    def __init__(self, work: Callable[[Console], int]) -> None:
        self.work = work

    def run(self, console: Console) -> int:
        """Do the work; errors become a sentence and a status."""
        try:
            return self.work(console)
        except KeyboardInterrupt:
            return console.complain(Interrupted())
        except Exception as error:
            return failure(error, console)


class GridJob:
    """
    Work on an open grid, which is opened before and closed after.

    Args:
        paths: on the grid, or ""; if no grid is configured, none is made for an alias or a cap.
        makes: whether one is made for other paths; not for objects that a new grid cannot have.

    Attributes:
        asks_servers: whether it will connect to the servers of the client's directory.
        follows_blacklist: see ``Grid.open``.
    """

    asks_servers = True
    follows_blacklist = False

    def __init__(
        self, work: Callable[[Grid, Console], Awaitable[int]], *paths: str, makes: bool = True
    ) -> None:
        self.work = work
        self._paths = paths
        self._makes = makes

    async def run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        """Do the work; errors and cancellation become a sentence and a status."""
        return await status_of_job(invocation.console, self._run(invocation, reactor, open_grid))

    async def _run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        make = invocation.directory is not None or self._may_make_grid()
        limits = (invocation.limit_rate, invocation.jobs, invocation.max_memory_bytes)
        with tracing(invocation.trace, reactor) as tracer:
            options = {
                "tracer": tracer,
                "wait_for": invocation.wait_for or None,
                "max_segment_bytes": invocation.max_segment_bytes,
                "limits": None if limits == (None, None, None) else settings.Limits(*limits),
                "make": None if make else False,
                "follows_blacklist": self.follows_blacklist or None,
            }
            said = {name: value for name, value in options.items() if value is not None}
            grid = await open_grid(reactor, invocation.directory, **said)
            return await self._run_on(grid, invocation.console)

    def _may_make_grid(self) -> bool:
        """
        Return whether a new grid may be made if none is configured.

        Not for a cap: a new grid would not have its object, and would report one of another grid as lost.

        Raises:
            CapError: a path begins with a damaged cap: a new grid would get in the way of the right one.
            UsageError: a path begins with an alias, and there are none.
        """
        if (self._makes and not self._paths) or client_paths.is_configured(
            client_paths.default_directory()
        ):
            return True

        grid_paths.check_may_be_aliases(self._paths)
        return not any(map(grid_paths.is_on_servers, self._paths)) and self._makes

    async def _run_on(self, grid: Grid, console: Console) -> int:
        try:
            if grid.created:
                console.note(grid.created)
            warn(grid, console, ())
            printed = grid.warnings
            try:
                status = await self.work(grid, console)
            finally:
                warn(grid, console, printed)  # print the warnings since the start
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                await grid.close()
            raise
        await grid.close()
        return status


class ReactorJob:
    """Work that needs a reactor, and no grid."""

    def __init__(self, work: Callable[[Any, Console], Awaitable[int]]) -> None:
        self.work = work

    async def run(self, invocation: Invocation, reactor: Any) -> int:
        """Do the work; errors and cancellation become a sentence and a status."""
        return await status_of_job(invocation.console, self.work(reactor, invocation.console))


class NoReactorJob(ReactorJob):
    """
    Work that may be possible without a reactor: loading one takes longer than many runs.

    Args:
        shortcut: does the work, and returns the exit status; None: it cannot, or not completely, and
            ``work`` does the rest. It blocks, so only a process of its own calls it. Its argument returns
            whether it must end; it then ends soon, by raising ``Interrupted``.
    """

    def __init__(
        self,
        shortcut: Callable[[Console, Callable[[], bool]], int | None],
        work: Callable[[Any, Console], Awaitable[int]],
    ) -> None:
        super().__init__(work)
        self._shortcut = shortcut

    def run_without_reactor(self, console: Console, stopped: Callable[[], bool]) -> int | None:
        """Do the work without a reactor if possible; errors become a sentence and a status."""
        try:
            return self._shortcut(console, stopped)
        except (KeyboardInterrupt, Interrupted):
            return console.complain(Interrupted())
        except Exception as error:
            return failure(error, console)


class ReactorGridJob(GridJob):
    """Work on an open grid that needs the reactor for other purposes, too."""

    def __init__(
        self,
        work: Callable[[Any, Grid, Console], Awaitable[int]],
        *paths: str,
        makes: bool = True,
    ) -> None:
        self._work, self._paths, self._makes = work, paths, makes

    async def run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        self.work = partial(self._work, reactor)
        return await super().run(invocation, reactor, open_grid)


Job = OfflineJob | GridJob | ReactorJob


def warn(grid: Grid, console: Console, printed: tuple[str, ...]) -> None:
    """Print the grid's warnings, except those in ``printed``."""
    for warning in grid.warnings:
        if warning not in printed:
            console.note(warning)


async def status_of_job(console: Console, work: Awaitable[int]) -> int:
    """Return the status of work; errors and cancellation become a sentence and a status."""
    from twisted.internet.defer import CancelledError

    try:
        status = await work
        return ExitStatus.FAILED if console.results.reader_left else status
    except (CancelledError, Interrupted):
        return console.complain(Interrupted())
    except Exception as error:
        return failure(error, console)


def failure(error: Exception, console: Console) -> int:
    """
    Report the error that ended a command, and return its exit status.

    If the reader of stdout has closed it, that and its consequences are not reported.
    """
    gone = console.results.reader_left or any(
        isinstance(each, BrokenPipeError) for each in (error, error.__cause__)
    )
    if gone and not isinstance(error, UnprintedCap):
        return ExitStatus.FAILED
    status = console.complain(error)
    if console.json and not (console.results.abandoned or console.results.failed):
        try:
            console.result("", {"error": sentence(error), "exit_status": int(status)})
        except Exception as second:
            console.complain(second)
    return status


@contextmanager
def tracing(path: str | None, reactor: Any) -> Iterator[trace.Tracer | None]:
    """Give a tracer that writes to path, atomically at the end; None without a path."""
    if path is None:
        yield None
        return

    with ExitStack() as stack:
        try:
            # It shows which files were transferred, and when.
            fd = private_files.open_private(path, os.O_WRONLY | os.O_TRUNC)
            file = stack.enter_context(os.fdopen(fd, "wb"))
        except OSError as error:
            raise SinkError(f"cannot write the trace to {path}: {error.strerror}") from error
        tracer = trace.Tracer(reactor.seconds, file)
        try:
            yield tracer
        finally:
            try:
                tracer.close()
            except OSError as error:
                with suppress(OSError):  # a second attempt to write the rest would fail too
                    file.close()
                raise SinkError(f"cannot write the trace to {path}: {error.strerror}") from error
