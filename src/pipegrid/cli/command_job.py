"""
Jobs: what a parsed command line returns, ready to be run.

Commands return a job instead of doing it, since jobs with a grid need a running reactor, which the process
(or a test) provides.
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

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow
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
        base_directory: the directory of the client's configuration; None: the user's own.
        grid: the name of a grid in section ``[grids]`` of that configuration; None: the directory's own grid.
        trace: where to write a trace of all operations, or None.
        wait_for: how many servers must respond before work begins; 0: as soon as enough are known.
        max_segment_bytes: files with larger segments are not fetched; None: the default.
        limit_rate: the limit over all connections together; None: no limit.
        jobs: how many files to transfer at the same time; None: as many as memory and windows allow.
        max_memory_bytes: how much data to keep in memory; None: the default.
        places: where ``pipegrid.cfg`` sets each option, by the names of parameters, if the options are from a
            section of that file; else None.
        run_job: runs one job while the command line is still being parsed; None if that is impossible.
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
        The directory of the chosen grid; None: the user's own.

        Raises:
            UsageError: a grid was chosen by a name that the client's configuration does not have.
        """
        if self.grid is None:
            return self.base_directory
        return str(user_grids.grid_directory(self.own_directory, self.grid))

    @property
    def own_directory(self) -> Path:
        """The client's directory, whose configuration can name further grids."""
        return client_paths.own_directory(self.base_directory)

    @property
    def grid_directory(self) -> Path:
        """The directory of the chosen grid, which need not exist; raises the errors of ``directory``."""
        return client_paths.own_directory(self.directory)


class OfflineJob:
    """A job that needs no grid."""

    def __init__(self, work: Callable[[Console], int]) -> None:
        self.work = work

    def run(self, console: Console) -> int:
        """Do the work, and return the status; errors are printed as a sentence."""
        try:
            return self.work(console)
        except KeyboardInterrupt:
            return console.complain(Interrupted())
        except Exception as error:
            return failure(error, console)


class GridJob:
    """
    A job that opens a grid, works on it, and closes it.

    Args:
        paths: the paths on the grid that the work uses; "" has no effect. No new grid is made if a path
            begins with an alias, or with the cap of an object on servers.
        makes: whether a new grid may be made if no path forbids it; False for work on objects that a new grid
            cannot have.

    Attributes:
        asks_servers: whether the job will connect to the servers of the client's directory.
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
        """Do the work, and return the status; errors and cancellation are printed as a sentence."""
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

        No grid is made for a cap: a new grid would not have the cap's object, and would report the object as
        lost.

        Raises:
            CapError: a path begins with a damaged cap, so it is of an object that a new grid would not have.
            UsageError: a path begins with an alias, but no alias exists.
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
                warn(grid, console, printed)  # prints the warnings that came during the work
        except BaseException:
            with suppress(Exception):  # the error of the work is the one to report
                await grid.close()
            raise
        await grid.close()
        return status


class ReactorJob:
    """A job that needs a reactor, and no grid."""

    def __init__(self, work: Callable[[Any, Console], Awaitable[int]]) -> None:
        self.work = work

    async def run(self, invocation: Invocation, reactor: Any) -> int:
        """Do the work, and return the status; errors and cancellation are printed as a sentence."""
        return await status_of_job(invocation.console, self.work(reactor, invocation.console))


class NoReactorJob(ReactorJob):
    """
    A job that may be possible without a reactor, since loading one takes longer than many runs.

    Args:
        shortcut: does the work without a reactor, and returns the exit status; or returns None if ``work``
            must do all or the rest of the work. It blocks, so it is called only in a process that runs one
            command. Its argument is a function that returns whether the work must end; then ``shortcut`` soon
            raises ``Interrupted``.
    """

    def __init__(
        self,
        shortcut: Callable[[Console, Callable[[], bool]], int | None],
        work: Callable[[Any, Console], Awaitable[int]],
    ) -> None:
        super().__init__(work)
        self._shortcut = shortcut

    def run_without_reactor(self, console: Console, stopped: Callable[[], bool]) -> int | None:
        """
        Do the work without a reactor if possible, and return the status or None; errors are printed as a
        sentence.
        """
        try:
            return self._shortcut(console, stopped)
        except (KeyboardInterrupt, Interrupted):
            return console.complain(Interrupted())
        except Exception as error:
            return failure(error, console)


class ReactorGridJob(GridJob):
    """A job on an open grid whose work also gets the reactor."""

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
    """Await the work, and return the status; errors and cancellation are printed as a sentence."""
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

    Nothing is reported if the reader of stdout has closed its end, unless a cap could not be printed.
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
    """Yield a tracer that writes to a path, and close it at the end; yield None if there is no path."""
    if path is None:
        yield None
        return

    with ExitStack() as stack:
        try:
            # The file is private, since a trace shows which files were transferred, and when.
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
                with suppress(OSError):  # writing the rest would fail again
                    file.close()
                raise SinkError(f"cannot write the trace to {path}: {error.strerror}") from error
