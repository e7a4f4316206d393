"""What the commands of ``pipegrid mirror`` share: their options as one object, and their output."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from pipegrid.cli.console import Console
from pipegrid.cli.exit_status import ExitStatus
from pipegrid.cli.job import GridJob, NoReactorJob, ReactorGridJob, ReactorJob
from pipegrid.cli.startup.fast_verify import verified
from pipegrid.core.text import counted, printable
from pipegrid.errors import UsageError
from pipegrid.mirror import HIDDEN, MANIFEST, NEW_MANIFEST
from pipegrid.mirror.archive_file import Value

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from typing import Any

    from pipegrid.disk.commit import Policy
    from pipegrid.grid import Grid
    from pipegrid.mirror.destination import Destination
    from pipegrid.mirror.entries import Entries
    from pipegrid.mirror.mirror import Mirror
    from pipegrid.mirror.mirror_http import Address, SocketCache
    from pipegrid.mirror.preconnect_mirrors import EarlySockets
    from pipegrid.mirror.scheduler import Report, Tally


# What the commands that mirror have in common: their options as one, and their progress on a terminal.


Shortcut = Callable[[Console, Callable[[], bool]], "int | None"]
RunMirror = Callable[..., Awaitable[int]]


class Display:
    """A context manager: a bar on stderr, if somebody watches."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Any = None
        if console.shows_progress:
            from pipegrid.cli.progress_bar import open_bar

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
            from pipegrid.cli.progress_bar import close_bar

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
    from pipegrid.cli.grid_arguments import client_directory
    from pipegrid.grid.client_paths import is_configured

    directory = client_directory()
    if not is_configured(directory):
        raise UsageError(
            f"no grid is configured in {directory}, and --to-grid makes none; join one, or make one on this "
            "machine, with 'pipegrid init', or name the directory of another client with -d"
        )


# What the commands that mirror have to tell at their ends, and what of it goes into a grid.

# as ``typing`` has it, which is not to be waited for


async def store(
    mirror: Mirror, grid: Grid | None, report: Report, fetching: MirrorOptions
) -> dict[str, Any]:
    """Store what is there now, if that is wanted; returns what there is to tell of it."""
    if grid is None or report.failed_files or fetching.dry_run:
        return {}
    from pipegrid.mirror.grid_archive import GridStore

    stored = GridStore(mirror, grid, os.path.abspath(grid.config.directory), fetching.paranoid)
    cap = await stored.store()
    return {"cap": str(cap), "stored": stored.stored_files}


def tell_skipped(console: Console, entries: Entries) -> None:
    """Name the entries of indexes that could not be used."""
    for why in entries.skipped:
        console.fault(f"pipegrid: skipped: {printable(why)}")
    more = entries.skipped_files - len(entries.skipped)
    if more:
        console.fault(
            f"pipegrid: {counted(more, 'more entry', 'more entries')} skipped, for such reasons"
        )


def tell(
    console: Console,
    report: Report,
    dest: str,
    removed: list[str],
    dry_run: bool,
    further: dict[str, Any] | None = None,
) -> int:
    """
    Print what has become of a run; returns the exit status.

    Args:
        further: what the kind of archive has to tell besides, in JSON.
    """
    for path, why in report.failed:
        console.fault(f"pipegrid: {printable(path)} could not be fetched ({printable(why)})")
    _tell_how_many_more(console, report)
    would = "would be " if dry_run else ""
    for path in removed:
        console.detail(f"{printable(path)} {would or 'was '}removed")
    for tally in report.ranking:
        console.say(_ranked(tally))
    text = (
        f"{counted(report.fetched_files, 'file')}, {counted(report.fetched_bytes, 'byte')} {would}fetched;"
        f" {counted(report.present_files, 'was', 'were')} there, {report.failed_files} failed"
    )
    skipped = further.get("skipped", 0) if further is not None else 0
    if skipped:
        text += f", {skipped} skipped"
    if removed:
        text += f", {len(removed)} {would}removed"
    if further is not None and "cap" in further:
        text += f"\nin the grid: {further['cap']}"
    console.result(
        text,
        {
            "dest": dest,
            "dry_run": dry_run,
            "files": report.wanted_files,
            "bytes": report.wanted_bytes,
            "fetched": report.fetched_files,
            "fetched_bytes": report.fetched_bytes,
            "present": report.present_files,
            "failed": report.failed_files,
            "removed": len(removed),
            "retries": report.retries,
            "seconds": round(report.elapsed_s, 3),
            "mirrors": list(map(_tally_fields, report.ranking)),
            **(further or {}),
        },
    )
    return ExitStatus.FAILED if report.failed_files or skipped else ExitStatus.DONE


def _tally_fields(tally: Tally) -> dict[str, Any]:
    return {
        "url": tally.url,
        "files": tally.files,
        "bytes": tally.received_bytes,
        "bytes_per_s": round(tally.bytes_per_s),
        "refused": tally.refused,
        "broken": tally.broken,
        "given_up": tally.given_up,
    }


def _tell_how_many_more(console: Console, report: Report) -> None:
    more = report.failed_files - len(report.failed)
    if more:
        console.fault(f"pipegrid: {counted(more, 'more file')}, for reasons like these")


def _ranked(tally: Tally) -> str:
    rate = f"{tally.bytes_per_s / 1e6:.1f} MB/s" if tally.bytes_per_s else "nothing"
    text = f"{tally.url}: {counted(tally.files, 'file')}, {rate}"
    failed = f"{counted(tally.refused, 'file')} lacking or wrong" if tally.refused else ""
    broken = f"{counted(tally.broken, 'request')} failed" if tally.broken else ""
    if failed or broken:
        text += f"; {', '.join(filter(None, (failed, broken)))}"
    if tally.given_up is not None:
        text += f"; given up ({printable(tally.given_up)})"
    return text


def tell_verified(console: Console, report: Report, dest: str) -> int:
    """Print what ``verify`` has found; returns the exit status."""
    for path, why in report.failed:
        console.fault(f"pipegrid: {printable(path)}: {printable(why)}")
    _tell_how_many_more(console, report)
    if report.unnoted_files:
        files = counted(report.unnoted_files, "file")
        console.say(
            f"pipegrid: what hashing has found of {files} cannot be noted, since {dest} "
            "cannot be written to; have somebody verify it who may"
        )
    console.result(
        *verified(
            dest,
            report.wanted_files,
            report.wanted_bytes,
            report.present_files,
            report.failed_files,
            report.unnoted_files,
        )
    )
    return ExitStatus.CORRUPTION if report.failed_files else ExitStatus.DONE
