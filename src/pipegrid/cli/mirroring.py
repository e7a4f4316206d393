"""What the commands that mirror have in common: their options as one, and their progress on a terminal."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob, NoReactorJob, ReactorGridJob, ReactorJob
from pipegrid.core.text import counted
from pipegrid.errors import UsageError
from pipegrid.mirror import HIDDEN, MANIFEST, NEW_MANIFEST
from pipegrid.mirror.archive_file import Value

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from typing import Any

    from pipegrid.disk.commit import Policy
    from pipegrid.mirror.destination import Destination
    from pipegrid.mirror.mirror import Mirror
    from pipegrid.mirror.mirror_http import Address, SocketCache
    from pipegrid.mirror.preconnect_mirrors import EarlySockets
    from pipegrid.mirror.scheduler import Report

Shortcut = Callable[[Console, Callable[[], bool]], "int | None"]
RunMirror = Callable[..., Awaitable[int]]


class Display:
    """A context manager: a bar on stderr, if somebody watches."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Any = None
        if console.shows_progress:
            from pipegrid.cli.progress import open_bar

            self._bar = open_bar(console, "mirror")

    def show(self, report: Report) -> None:
        """Show how far it is."""
        bar = self._bar
        if bar is None:
            return
        bar.total = report.wanted_bytes
        done = report.present_files + report.fetched_files
        bar.set_postfix_str(f"{done}/{counted(report.wanted_files, 'file')}", refresh=False)
        bar.update(report.present_bytes + report.fetched_bytes - bar.n)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            from pipegrid.cli.progress import close_bar

            close_bar(self._console, self._bar)


class MirrorOptions(Value):
    """
    How a command fetches: the options that all of them have.

    Attributes:
        limit_bytes_per_s: from all mirrors together, or None.
        sample: percent of what is there that is hashed again.
        keep_going: indexes are shown also if some of what they name is missing.
        begun: connections to the mirrors that were begun before all else, or None.
    """

    __slots__ = (
        "begun",
        "connections",
        "delete",
        "dry_run",
        "durability",
        "keep_going",
        "limit_bytes_per_s",
        "paranoid",
        "sample",
        "to_grid",
        "urls",
    )

    def __init__(
        self,
        urls: tuple[str, ...],
        to_grid: bool,
        delete: bool,
        dry_run: bool,
        connections: int,
        limit_bytes_per_s: int | None,
        durability: Policy,
        sample: float,
        paranoid: bool,
        begun: EarlySockets | None = None,
        keep_going: bool = False,
    ) -> None:
        self.urls = urls
        self.to_grid = to_grid
        self.delete = delete
        self.dry_run = dry_run
        self.connections = connections
        self.limit_bytes_per_s = limit_bytes_per_s
        self.durability = durability
        self.sample = sample
        self.paranoid = paranoid
        self.begun = begun
        self.keep_going = keep_going

    @property
    def sample_share(self) -> float:
        """How much of what is there is hashed again, 0.0 to 1.0; ``sample`` is in percent."""
        return self.sample / 100

    def job(self, shortcut: Shortcut, work: RunMirror) -> ReactorJob | GridJob:
        """
        Return what does a run.

        Args:
            shortcut: tried first where a reactor is needed only for mirrors that do not what they should; see
                ``NoReactorJob``.
            work: is given a grid, too, if the run is to be stored in one.

        Raises:
            UsageError: it is, and none is configured.
        """
        if self.to_grid:
            _check_configured()
            return ReactorGridJob(lambda reactor, grid, console: work(reactor, console, grid))
        if self.dry_run or self.limit_bytes_per_s is not None:
            return ReactorJob(work)
        return NoReactorJob(shortcut, work)

    def check_deleting(self, dest: str) -> None:
        """
        Raises:
            UsageError: files would be deleted that no run of ours has met, be it for a slip in ``dest``.
        """
        if not self.delete or self.dry_run or _was_mirrored_to(dest):
            return
        for above, directories, files in os.walk(dest):
            if above == dest and HIDDEN in directories:
                directories.remove(
                    HIDDEN
                )  # of a run that has failed before it gave any file its name
            if files or any(os.path.islink(os.path.join(above, each)) for each in directories):
                raise UsageError(
                    f"{dest} was no mirror until now, and --delete would remove the files that are in it; if "
                    "they belong to this one, mirror once without --delete"
                )

    def direct_addresses(self) -> list[Address] | None:
        """Return those of the mirrors, if one can begin to ask them without a reactor."""
        from pipegrid.mirror.mirror_http import can_sprint, parse_url, through

        addresses = [through(parse_url(url), os.environ) for url in self.urls]
        return addresses if can_sprint(addresses) else None

    def dial(self, addresses: Sequence[Address], each: int = 1) -> SocketCache:
        """Begin to connect to mirrors, so many times to each, as far as that was not begun already."""
        from pipegrid.mirror.mirror_http import SocketCache

        return SocketCache(addresses, each, self.begun)

    @asynccontextmanager
    async def mirror(
        self, reactor: Any, console: Console, dest: str | Destination
    ) -> AsyncIterator[Mirror]:
        """Open a mirror that shows its progress; it is closed in the end."""
        from pipegrid.mirror.mirror import Mirror

        with Display(console) as display:
            mirror = Mirror(
                reactor,
                self.urls,
                dest,
                durability=self.durability,
                connections=self.connections,
                paranoid=self.paranoid,
                sample=self.sample_share,
                limit_bytes_per_s=self.limit_bytes_per_s,
                progress=display.show,
                dry_run=self.dry_run,
                environment=os.environ,
            )
            try:
                yield mirror
            finally:
                await mirror.close()


def _was_mirrored_to(dest: str) -> bool:
    """Return whether a run has begun there that was no dry one; who only looks leaves a lock there, too."""
    return any(
        os.path.lexists(os.path.join(dest, HIDDEN, name)) for name in (MANIFEST, NEW_MANIFEST)
    )


def _check_configured() -> None:
    """
    Raises:
        UsageError: no grid is configured. A mirror is large, and is to survive this machine in the grid: one
            that nobody chose would be on the same disk.
    """
    from pipegrid.cli.files import client_directory
    from pipegrid.grid.client_paths import is_configured

    directory = client_directory()
    if not is_configured(directory):
        raise UsageError(
            f"no grid is configured in {directory}, and --to-grid makes none; join one, or make one on this "
            "machine, with 'pipegrid init', or name the directory of another client with -d"
        )
