"""
What a parsed command line asks for, ready to be done.

Commands return a job instead of doing it: those that need a grid want a running reactor, which
the process (or a test) provides.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, Interrupted, UnprintedCap, sentence
from pipegrid.disk import private_files
from pipegrid.errors import SinkError
from pipegrid.grid import client_paths
from pipegrid.reactor import trace
from pipegrid.transfer import settings
from pipegrid.tree import grid_paths

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from typing import Any

    from twisted.internet.defer import Deferred

    from pipegrid.tree.public_grid import Grid

OpenGrid = Callable[..., "Deferred[Grid]"]


class Invocation:
    """
    What the options before the command say.

    Attributes:
        directory: of the client's configuration; None: the user's own.
        trace: where to write a trace of all that happened, or None.
        wait_for: how many servers must answer before work begins; 0: as many as it needs are known.
        max_segment_bytes: files with larger segments are not fetched; None: the usual.
        limit_rate: bytes a second, each way, over all connections; None: no limit.
        jobs: files at once; None: as many as memory and windows allow.
        max_memory_bytes: of data; None: the usual.
        run_job: does a job while the command line is still looked at, once; None: nobody can.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.directory: str | None = None
        self.trace: str | None = None
        self.wait_for = 0
        self.max_segment_bytes: int | None = None
        self.limit_rate: int | None = None
        self.jobs: int | None = None
        self.max_memory_bytes: int | None = None
        self.run_job: Callable[[GridJob, Invocation], int] | None = None


class OfflineJob:
    """Work that needs no grid."""

    def __init__(self, work: Callable[[Console], int]) -> None:
        self.work = work

    def run(self, console: Console) -> int:
        """Do it; errors become a sentence and a status."""
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
        paths: on the grid, or ""; where nothing is configured, no grid is made for an alias or a cap.
        makes: whether one is made there for anything else; not for what a new grid cannot have.

    Attributes:
        asks_servers: whether it is going to connect to the servers of the client's directory.
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
        """Do it; errors and cancellation become a sentence and a status."""
        return await status_of_job(invocation.console, self._run(invocation, reactor, open_grid))

    async def _run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        make = invocation.directory is not None or self._may_make_grid()
        with tracing(invocation.trace, reactor) as tracer:
            options = {
                "tracer": tracer,
                "wait_for": invocation.wait_for or None,
                "max_segment_bytes": invocation.max_segment_bytes,
                "limits": self._limits(invocation),
                "make": None if make else False,
                "follows_blacklist": self.follows_blacklist or None,
            }
            said = {name: value for name, value in options.items() if value is not None}
            grid = await open_grid(reactor, invocation.directory, **said)
            return await self._run_on(grid, invocation.console)

    def _may_make_grid(self) -> bool:
        """
        Return whether there may be a new grid where none is configured.

        Not for a cap: it would have nothing of what that names, and say so of what another grid has.

        Raises:
            CapError: a path begins with a cap that is damaged: a grid would be in the way of the one meant.
            UsageError: a path begins with an alias, and there are none.
        """
        if (self._makes and not self._paths) or client_paths.is_configured(
            client_paths.default_directory()
        ):
            return True

        grid_paths.check_may_be_aliases(self._paths)
        return not any(map(grid_paths.is_on_servers, self._paths)) and self._makes

    @staticmethod
    def _limits(invocation: Invocation) -> settings.Limits | None:
        given = (invocation.limit_rate, invocation.jobs, invocation.max_memory_bytes)
        if given == (None, None, None):
            return None

        return settings.Limits(*given)

    async def _run_on(self, grid: Grid, console: Console) -> int:
        try:
            if grid.created:
                console.say(f"pipegrid: {grid.created}")
            warn(grid, console, ())
            told = grid.warnings
            try:
                status = await self.work(grid, console)
            finally:
                warn(grid, console, told)  # of what came up meanwhile
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                await grid.close()
            raise
        await grid.close()
        return status


class ReactorJob:
    """Work that needs a reactor, and no grid."""

    def __init__(self, work: Callable[[Any, Console], Awaitable[int]]) -> None:
        self.work = work

    async def run(self, invocation: Invocation, reactor: Any) -> int:
        """Do it; errors and cancellation become a sentence and a status."""
        return await status_of_job(invocation.console, self.work(reactor, invocation.console))


class NoReactorJob(ReactorJob):
    """
    Work that may be done before there is a reactor: loading one takes longer than many a run.

    Args:
        shortcut: does the work, and returns the exit status; None: it cannot, or not all of it, and ``work``
            does the rest. It blocks, so only a process of its own calls it. It is given what tells whether it
            is to end, which it does soon, by raising ``Interrupted``.
    """

    def __init__(
        self,
        shortcut: Callable[[Console, Callable[[], bool]], int | None],
        work: Callable[[Any, Console], Awaitable[int]],
    ) -> None:
        super().__init__(work)
        self._shortcut = shortcut

    def run_without_reactor(self, console: Console, stopped: Callable[[], bool]) -> int | None:
        """Do it if that can be; errors become a sentence and a status."""
        try:
            return self._shortcut(console, stopped)
        except (KeyboardInterrupt, Interrupted):
            return console.complain(Interrupted())
        except Exception as error:
            return failure(error, console)


class ReactorGridJob(GridJob):
    """Work on an open grid that needs the reactor for other things, too."""

    def __init__(self, work: Callable[[Any, Grid, Console], Awaitable[int]], *paths: str) -> None:
        self._work, self._paths, self._makes = work, paths, True

    async def run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        self.work = partial(self._work, reactor)
        return await super().run(invocation, reactor, open_grid)


Job = OfflineJob | GridJob | ReactorJob


def warn(grid: Grid, console: Console, told: tuple[str, ...]) -> None:
    """Say what is wrong with the grid, beyond what was told."""
    for warning in grid.warnings:
        if warning not in told:
            console.say(f"pipegrid: {warning}")


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

    A reader of stdout who has seen enough is no reason for words, nor is what comes of that.
    """
    gone = (
        console.results.reader_left
        or isinstance(error, BrokenPipeError)
        or isinstance(error.__cause__, BrokenPipeError)
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
    """Give a tracer that writes to path, whole at the end; None if no path is given."""
    if path is None:
        yield None
        return

    with ExitStack() as stack:
        try:
            # It says which files were moved, and when.
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
                with suppress(OSError):  # what it could not write it would try again
                    file.close()
                raise SinkError(f"cannot write the trace to {path}: {error.strerror}") from error
