"""
The options that the commands of ``pipegrid mirror`` share, as one object, and what these commands print.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from pipegrid.cli import cap_lookup, progress_bar
from pipegrid.cli.command_job import GridJob, NoReactorJob, ReactorGridJob, ReactorJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, Interrupted
from pipegrid.cli.startup.fast_mirror_verify import verified
from pipegrid.core.text import amount, counted, printable
from pipegrid.errors import UsageError
from pipegrid.grid import client_paths
from pipegrid.mirror import (
    HIDDEN,
    MANIFEST,
    NEW_MANIFEST,
    archive_to_grid,
    credentials,
    destination,
    epoll_socket_cache,
    mirror_api,
    mirror_urls,
)
from pipegrid.mirror.file_scheduler import MAX_SHOWN

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow

if TYPE_CHECKING:
    from typing import Any

    from pipegrid.disk.durability import Policy
    from pipegrid.grid import Grid
    from pipegrid.mirror.destination import Destination
    from pipegrid.mirror.file_scheduler import Report, Tally
    from pipegrid.mirror.preconnect_mirrors import EarlySockets
    from pipegrid.mirror.unique_entries import Entries


# The options that the commands share, as one object, and the progress bar.


Shortcut = Callable[[Console, Callable[[], bool]], "int | None"]
RunMirror = Callable[..., Awaitable[int]]

LOCK_LOOK_S = 0.2
"""How many seconds pass between checks whether another run has ended."""


APT = "/etc/apt"
"""The directory that contains apt's ``auth.conf`` and ``auth.conf.d``."""


class MirrorProgress:
    """A context manager that shows a progress bar on stderr, if that is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Any = None
        if console.shows_progress:
            self._bar = progress_bar.open_bar(console, "mirror")

    def show(self, report: Report) -> None:
        """Show the progress that a report has reached."""
        bar = self._bar
        if bar is None:
            return
        bar.total = report.wanted_bytes
        done = report.present_files + report.fetched_files
        left_files = report.wanted_files - done - report.failed_files
        left_bytes = report.wanted_bytes - report.present_bytes - report.fetched_bytes
        bar.set_description_str(
            f"mirror, {counted(left_files, 'file')} and {amount(max(0, left_bytes))} left",
            refresh=False,
        )
        bar.set_postfix_str(f"{done}/{counted(report.wanted_files, 'file')}", refresh=False)
        bar.update(report.present_bytes + report.fetched_bytes - bar.n)

    def __enter__(self) -> MirrorProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            progress_bar.close_bar(self._console, self._bar)


def has_credential_files(environment: Mapping[str, str]) -> bool:
    """Return whether a file exists that may have credentials: ``~/.netrc`` or a file of apt's."""
    home = environment.get("HOME")
    files = [environment.get("NETRC"), home and os.path.join(home, ".netrc"), f"{APT}/auth.conf"]
    if any(each and os.path.lexists(each) for each in files):
        return True
    try:
        return bool(os.listdir(f"{APT}/auth.conf.d"))
    except FileNotFoundError:
        return False
    except OSError:
        return True


class MirrorOptions:
    """
    The options that all commands that fetch share.

    Args:
        given: attributes by their names; attributes that are not given have their defaults.

    Attributes:
        limit_bytes_per_s: the rate limit for all mirrors together, or None.
        sample: percentage of the existing files to hash again.
        filters: arguments of ``PackageFilter``, which select packages of indexes; None: all packages.
        delete_excluded: with ``delete``, also remove files that only filters of earlier runs select.
        gpgcheck: whether RPM packages must be signed.
        begun: connections to the mirrors that were opened in advance, or None.
        wait_s: how long to wait for another run to the same destination; None: not at all.
        exit_unchanged: whether a run that changes nothing ends with a special exit status.
        access: the proxies and credentials for each host; None until they are needed.
        tls: the given certificate authorities and client certificate; None if neither is given.
        sign_with: the key that signs new indexes; None: no new indexes are made.
    """

    urls: tuple[str, ...] = ()
    to_grid: bool = False
    delete: bool = False
    delete_excluded: bool = False
    dry_run: bool = False
    connections: int = 4
    limit_bytes_per_s: int | None = None
    durability: Policy = "batch"
    sample: float = 0.0
    paranoid: bool = False
    filters: dict[str, Any] | None = None
    gpgcheck: bool = False
    wait_s: float | None = None
    exit_unchanged: bool = False
    begun: EarlySockets | None = None
    access: mirror_urls.HostAccess | None = None
    tls: credentials.TlsFiles | None = None
    sign_with: str | None = None

    def __init__(self, **given: Any) -> None:
        if unknown := given.keys() - self.__annotations__.keys():
            raise TypeError(f"no options of mirrors: {', '.join(sorted(unknown))}")
        vars(self).update(given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MirrorOptions) and all(
            getattr(self, name) == getattr(other, name) for name in self.__annotations__
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def sample_share(self) -> float:
        """The share of existing files that are hashed again, 0.0 to 1.0; ``sample`` is in percent."""
        return self.sample / 100

    def job(self, shortcut: Shortcut, work: RunMirror) -> ReactorJob | GridJob:
        """
        Return the job of a run.

        Args:
            shortcut: does the work without a reactor if possible; see ``NoReactorJob``. Not called for a dry
                run, with a rate limit, or if the mirror is stored in a grid.
            work: does the work with a reactor; it also gets a grid, if the mirror is stored in one.

        Raises:
            UsageError: the mirror must be stored in a grid, but no grid is configured.
        """
        if self.to_grid:
            _check_configured()
            return ReactorGridJob(lambda reactor, grid, console: work(reactor, console, grid))
        if self.dry_run or self.limit_bytes_per_s is not None:
            return ReactorJob(work)
        return NoReactorJob(shortcut, work)

    def check_deleting(self, dest: str) -> None:
        """
        Check that ``--delete`` cannot remove the files of another directory.

        Raises:
            UsageError: ``dest`` contains files, but no run has mirrored to it; perhaps its name is misspelt.
        """
        if not self.delete or self.dry_run or _was_mirrored_to(dest):
            return
        for above, directories, files in os.walk(dest):
            if above == dest and HIDDEN in directories:
                directories.remove(HIDDEN)  # left by a run that published no file
            if files or any(os.path.islink(os.path.join(above, each)) for each in directories):
                raise UsageError(
                    f"{dest} is not a mirror yet, and --delete would remove the files in it; if they belong "
                    "to the mirror, run once without --delete"
                )

    def host_access(self, console: Console) -> mirror_urls.HostAccess:
        """
        Return the proxies and credentials for each host; report credential files that other users can read.
        """
        if self.access is None:
            known = None
            if has_credential_files(os.environ):
                found = credentials.read_credentials(os.environ, APT)
                for warning in found.warnings:
                    console.fault(warning)
                known = found.header_for
            if self.tls is not None:
                for warning in self.tls.warnings:
                    console.fault(warning)
                for url in self.urls:
                    self.tls.show_to(url)
            self.access = mirror_urls.HostAccess(os.environ, known, self.tls)
        return self.access

    def direct_addresses(self, console: Console) -> list[mirror_urls.Address] | None:
        """Return the addresses of the mirrors, or None if fetching from them needs a reactor."""
        access = self.host_access(console)
        addresses = [access.address(url) for url in self.urls]
        return addresses if epoll_socket_cache.can_use_epoll(addresses) else None

    def dial(
        self, addresses: Sequence[mirror_urls.Address], each: int = 1
    ) -> epoll_socket_cache.SocketCache:
        """Return ``each`` connections per mirror; some of them may have been begun in advance."""

        return epoll_socket_cache.SocketCache(addresses, each, self.begun)

    def destination(
        self, console: Console, dest: str, stopped: Callable[[], bool]
    ) -> destination.Destination | None:
        """
        Return the destination as soon as no other run uses it; None if ``--wait`` is not given.

        Raises:
            DestinationLocked: another run still uses the destination at the end of the wait.
            Interrupted: the run was interrupted while it waited.
        """
        if self.wait_s is None:
            return None

        for _ in self._attempts(console, dest):
            with suppress(destination.DestinationLocked):
                return destination.Destination(dest)
            if stopped():
                raise Interrupted
            time.sleep(LOCK_LOOK_S)
        return destination.Destination(dest)

    def _attempts(self, console: Console, dest: str) -> Iterator[None]:
        """
        Yield before each attempt to open the destination, until ``wait_s`` is over; report the wait after the
        first.
        """
        if not self.wait_s:
            return
        until_s = time.monotonic() + self.wait_s
        yield
        console.note(f"another process uses {dest}; waiting for it, {self.wait_s:.0f} s at most")
        while time.monotonic() < until_s:
            yield

    @asynccontextmanager
    async def mirror(
        self, reactor: Any, console: Console, dest: str | Destination
    ) -> AsyncIterator[tuple[mirror_api.Mirror, MirrorProgress]]:
        """
        Open a mirror with a progress bar, as soon as no other run uses the destination; close it at the end.
        """
        from twisted.internet.task import deferLater

        with MirrorProgress(console) as display:

            def make() -> mirror_api.Mirror:
                return mirror_api.Mirror(
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
                    access=self.host_access(console),
                )

            opened = None
            for _ in self._attempts(console, str(dest)):
                with suppress(destination.DestinationLocked):
                    opened = make()
                    break
                await deferLater(reactor, LOCK_LOOK_S)
            opened = opened or make()
            try:
                yield opened, display
            finally:
                await opened.close()


def _was_mirrored_to(dest: str) -> bool:
    """Return whether a run to ``dest`` has begun; dry runs, which leave only a lock, do not count."""
    return any(
        os.path.lexists(os.path.join(dest, HIDDEN, name)) for name in (MANIFEST, NEW_MANIFEST)
    )


def _check_configured() -> None:
    """
    Check that a grid is configured.

    Raises:
        UsageError: no grid is configured. None is made: a mirror is large, and its copy in the grid must
            survive this machine, but a new local grid would be on the same disk.
    """

    directory = cap_lookup.client_directory()
    if not client_paths.is_configured(directory):
        raise UsageError(
            f"no grid is configured in {directory}, and --to-grid makes none; join one, or make one on this "
            "machine, with 'pipegrid init', or name the directory of another client with -d"
        )


# What the commands print at their end, and how a mirror is stored in a grid.


async def store(
    mirror: mirror_api.Mirror, grid: Grid | None, report: Report, fetching: MirrorOptions
) -> dict[str, Any]:
    """Store the mirror in a grid if one is given; return additional JSON fields."""
    if grid is None or report.failed_files or fetching.dry_run:
        return {}

    stored = archive_to_grid.GridStore(
        mirror, grid, os.path.abspath(grid.config.directory), fetching.paranoid
    )
    cap = await stored.store()
    return {"cap": str(cap), "stored": stored.stored_files}


def report_skipped(console: Console, entries: Entries) -> None:
    """Report the entries of indexes that were skipped."""
    for why in entries.skipped:
        console.fault(f"skipped: {printable(why)}")
    if more := entries.skipped_files - len(entries.skipped):
        console.fault(
            f"{counted(more, 'more entry', 'more entries')} skipped, for reasons like these"
        )


def print_outcome(
    console: Console,
    fetching: MirrorOptions,
    dest: str,
    report: Report,
    removed: list[str],
    changes: int,
    **further: Any,
) -> int:
    """
    Print the outcome of a run to ``dest``; return the exit status.

    With ``-q``, a successful run that changed nothing prints nothing (except for ``--json``), and any other
    run prints the changes and the totals, in a form that suits a mail of cron.

    Args:
        removed: the paths of removed files.
        changes: how many changes in ``dest`` the run made, or would make, apart from the files in ``report``.
        further: JSON fields that only this kind of archive has.
    """
    changed = bool(report.fetched_files or removed or changes)
    for path, why in report.failed:
        console.fault(f"{printable(path)} could not be fetched ({printable(why)})")
    _print_how_many_more(console, report)
    for tally in report.ranking:
        console.say(_ranked(tally))
    failed = bool(report.failed_files or further.get("skipped") or further.get("unmatched"))
    names = [
        *_named("+", report.fetched, report.fetched_files),
        *_named("-", removed, len(removed)),
    ]
    for path in removed[MAX_SHOWN:]:
        console.detail(f"- {printable(path)}")
    text = _summary(report, removed, fetching.dry_run, further.get("skipped", 0))
    is_quiet = console.verbosity < 0
    if is_quiet:
        totals = f"{counted(report.wanted_files, 'file')}, {amount(report.wanted_bytes)} in all"
        text = "\n".join((f"{printable(dest)}: {text}", *names, totals))
    else:
        for each in names:
            console.say(each)
    if "cap" in further:
        text += f"\nin the grid: {further['cap']}"
    if changed or failed or console.json or not is_quiet:
        fields = {"dest": dest, "changed": changed, "dry_run": fetching.dry_run}
        console.result(text, {**fields, **_fields(report, removed), **further})
    if failed:
        return ExitStatus.FAILED
    unchanged = fetching.exit_unchanged and not changed
    return ExitStatus.UNCHANGED if unchanged else ExitStatus.DONE


def _summary(report: Report, removed: Sequence[str], dry_run: bool, skipped: int) -> str:
    would = "would be " if dry_run else ""
    text = (
        f"{counted(report.fetched_files, 'file')}, {counted(report.fetched_bytes, 'byte')} {would}fetched;"
        f" {counted(report.present_files, 'was', 'were')} present, {report.failed_files} failed"
    )
    if skipped:
        text += f", {skipped} skipped"
    if removed:
        text += f", {len(removed)} {would}removed"
    return text


def _fields(report: Report, removed: Sequence[str]) -> dict[str, Any]:
    return {
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
    }


def _named(sign: str, paths: Sequence[str], files: int) -> list[str]:
    """
    Return a line for each of the first ``MAX_SHOWN`` paths, and a line with the number of further files.
    """
    lines = [f"{sign} {printable(path)}" for path in paths[:MAX_SHOWN]]
    more = files - len(lines)
    return [*lines, f"{sign} {counted(more, 'more file')}"] if more else lines


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


def _print_how_many_more(console: Console, report: Report) -> None:
    if more := report.failed_files - len(report.failed):
        console.fault(f"{counted(more, 'more file')}, for reasons like these")


def _ranked(tally: Tally) -> str:
    rate = f"{tally.bytes_per_s / 1e6:.1f} MB/s" if tally.bytes_per_s else "nothing"
    text = f"{tally.url}: {counted(tally.files, 'file')}, {rate}"
    failed = f"{counted(tally.refused, 'file')} missing or wrong" if tally.refused else ""
    broken = f"{counted(tally.broken, 'request')} failed" if tally.broken else ""
    if failed or broken:
        text += f"; {', '.join(filter(None, (failed, broken)))}"
    if tally.given_up is not None:
        text += f"; given up ({printable(tally.given_up)})"
    return text


def report_verified(console: Console, report: Report, dest: str) -> int:
    """Print the result of ``verify``; return the exit status."""
    for path, why in report.failed:
        console.fault(f"{printable(path)}: {printable(why)}")
    _print_how_many_more(console, report)
    if report.unnoted_files:
        files = counted(report.unnoted_files, "file")
        console.note(
            f"the verified hashes of {files} cannot be recorded, since {dest} cannot be written "
            "to; verify it as a user who may write there"
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
