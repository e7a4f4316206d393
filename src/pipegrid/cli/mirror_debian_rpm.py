"""The jobs of ``mirror debian`` and ``mirror rpm``, which load a reactor only if they need one."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from pipegrid.cli.command_job import GridJob, ReactorJob
from pipegrid.cli.error_report import Interrupted
from pipegrid.cli.mirror_options import (
    MirrorOptions,
    MirrorProgress,
    print_outcome,
    report_skipped,
    store,
)
from pipegrid.core.text import counted, printable
from pipegrid.mirror import (
    debian_archive,
    debian_index_selection,
    destination,
    local_check,
    mirror_without_reactor,
    package_filter,
    rpm_repository,
    signatures,
)

if TYPE_CHECKING:
    from pipegrid.cli.console import Console
    from pipegrid.grid import Grid
    from pipegrid.mirror.debian_index_update import ArchiveMirror
    from pipegrid.mirror.file_scheduler import Report
    from pipegrid.mirror.mirror_lists import Metalink
    from pipegrid.mirror.mirror_without_reactor import BlockingMirror

UpdateArchive = Callable[["ArchiveMirror", "Console"], Awaitable[tuple[Any, dict[str, Any]]]]
"""Type of a function that updates an archive; it returns the outcome, and additional JSON fields."""

Keep = Callable[["Report"], Awaitable[dict[str, Any]]]
"""A function that stores the mirror in a grid if a grid is given; it returns additional JSON fields."""

DEBIAN_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class DebianOptions(NamedTuple):
    """The options of ``mirror debian``; see their declarations."""

    suites: tuple[str, ...]
    components: tuple[str, ...]
    architectures: tuple[str, ...]
    source: bool
    keep_going: bool
    keyrings: tuple[str, ...]
    allow_unsigned: bool
    ignore_dates: bool
    indexes: debian_index_selection.KeptForm
    diffs: bool
    also: tuple[str, ...]
    from_grid: str | None = None

    def selection(self, filter: package_filter.PackageFilter) -> debian_index_selection.Selection:
        """Return which parts of the archive are wanted."""
        return debian_index_selection.Selection(
            suites=tuple(dict.fromkeys(self.suites)),
            components=tuple(dict.fromkeys(self.components)),
            architectures=tuple(dict.fromkeys(self.architectures)),
            with_sources=self.source,
            with_patches=self.diffs,
            also=self.also,
            indexes=self.indexes,
            filter=filter,
        )


class RpmOptions(NamedTuple):
    """The options of ``mirror rpm``; see their declarations."""

    newest_only: bool
    keep_going: bool
    keyrings: tuple[str, ...]
    allow_unsigned: bool
    from_grid: str | None = None
    metalink: str | None = None
    mirrorlist: str | None = None


def debian_job(dest: str, options: DebianOptions, fetching: MirrorOptions) -> ReactorJob | GridJob:
    """Return the job of ``mirror debian``."""

    async def update(mirror: ArchiveMirror, console: Console) -> tuple[Any, dict[str, Any]]:

        rings = options.keyrings or ((DEBIAN_KEYRING,) if os.path.exists(DEBIAN_KEYRING) else ())
        selection = options.selection(filter_of(fetching.filters))
        keys = signatures.Keys(rings, options.allow_unsigned)
        with opened_key(fetching, mirror) as key:
            archive = debian_archive.DebianArchive(
                mirror, selection, keys, ignores_dates=options.ignore_dates, signing=key
            )
            outcome = await archive.sync(
                fetching.delete, fetching.dry_run, options.keep_going, fetching.delete_excluded
            )
        for path in outcome.lacking:
            console.detail(f"no mirror has {printable(path)}")
        if outcome.absent:
            first, *others = outcome.absent
            more = counted(len(others), "other index", "other indexes")
            console.note(printable(first) + (f"; the same is true of {more}" if others else ""))
        return outcome, {"patched": outcome.patched, "lacking": outcome.lacking}

    return ArchiveRun(dest, fetching, update).job()


def rpm_job(
    dest: str,
    options: RpmOptions,
    fetching: MirrorOptions,
    metalink: Metalink | None = None,
) -> ReactorJob | GridJob:
    """Return the job of ``mirror rpm``; ``metalink`` is the parsed file of ``--metalink``."""

    async def update(mirror: ArchiveMirror, console: Console) -> tuple[Any, dict[str, Any]]:

        wanted = filter_of(fetching.filters)
        keys = signatures.Keys(options.keyrings, options.allow_unsigned)
        with opened_key(fetching, mirror) as key:
            repository = rpm_repository.RpmRepository(
                mirror, keys, options.newest_only, wanted, metalink, fetching.gpgcheck, key
            )
            outcome = await repository.sync(
                fetching.delete, fetching.dry_run, options.keep_going, fetching.delete_excluded
            )
        if outcome.lacking_sources:
            console.note(
                "this repository lacks the sources (src.rpm) of selected packages, "
                f"{counted(outcome.lacking_sources, 'file')}; mirror the one that has them as well"
            )
        return outcome, {}

    return ArchiveRun(dest, fetching, update).job()


def opened_key(
    fetching: MirrorOptions, mirror: ArchiveMirror
) -> AbstractContextManager[signatures.GpgKey | None]:
    """Return a context manager for the key that signs new indexes; it yields None if this run makes none."""
    if fetching.sign_with is None:
        return nullcontext()
    return signatures.GpgKey(fetching.sign_with, mirror.is_stopped)


def filter_of(given: Mapping[str, Any] | None) -> package_filter.PackageFilter:
    """
    Return the package filter for the given options; see ``cmd_mirror.debian_filters`` and ``rpm_filters``.
    """
    return package_filter.PackageFilter(**given) if given else package_filter.ALL


def _print_unmatched(console: Console, outcome: Any) -> list[str]:
    """Report the patterns of filters that match no package; return the reports for JSON."""
    if outcome.spares_others:
        console.note(
            "files that filters of earlier runs select are kept; --delete-excluded removes them"
        )
    if not outcome.unmatched:
        return []
    texts = [package_filter.unmatched_text(*each) for each in outcome.unmatched]
    for text in texts:
        console.fault(printable(text))
    return texts


class ArchiveRun:
    """One run of ``mirror debian`` or ``mirror rpm``, which loads a reactor as late as possible."""

    def __init__(self, dest: str, fetching: MirrorOptions, update: UpdateArchive) -> None:
        self._dest = dest
        self._fetching = fetching
        self._update = update
        self._begun: tuple[Coroutine[Any, Any, int], BlockingMirror] | None = None

    def job(self) -> ReactorJob | GridJob:
        """
        Return the job of this run.

        Raises:
            UsageError: ``--delete`` would delete files that are not the mirror's.
        """
        self._fetching.check_deleting(self._dest)
        return self._fetching.job(self.early, self.run)

    def early(self, console: Console, stopped: Callable[[], bool]) -> int | None:
        """
        Work without a reactor; return the exit status, or None if ``run`` must do all or the rest of the
        work.
        """
        fetching = self._fetching
        addresses = fetching.direct_addresses(console)
        if addresses is None:
            return None
        with ExitStack() as stack:
            opened = stack.enter_context(ExitStack())
            target = fetching.destination(console, self._dest, stopped)
            if target is not None:
                opened.callback(target.close)
            preconnected = stack.enter_context(closing(fetching.dial(addresses)))
            # The modules that the following lines use are imported while connections are being made.

            display = stack.enter_context(MirrorProgress(console))
            if target is None:
                target = destination.Destination(self._dest)
                opened.callback(target.close)
            mirror = mirror_without_reactor.BlockingMirror(
                addresses,
                target,
                mirror_without_reactor.FetchRules(
                    local_check.VerifyPolicy(fetching.paranoid, fetching.sample_share),
                    fetching.durability,
                    fetching.connections,
                ),
                preconnected,
                stopped,
                display.show if console.shows_progress else None,
            )
            work = self._work(mirror, console)
            try:
                done = mirror_without_reactor.begin_early(work)
            except Exception:
                if stopped():
                    raise Interrupted from None
                raise
            if done is not None:
                return done[0]
            self._begun = work, mirror
            opened.pop_all()  # keeps the destination open for ``run``
        return None

    async def _work(self, mirror: ArchiveMirror, console: Console, keep: Keep | None = None) -> int:
        fetching = self._fetching
        outcome, further = await self._update(mirror, console)
        report, entries = outcome.report, outcome.entries
        report_skipped(console, entries)
        unmatched = _print_unmatched(console, outcome)
        if report.failed_files and not outcome.is_published and not fetching.dry_run:
            console.note(
                "the old indexes stay, and name only files that exist; --keep-going publishes "
                "the new ones"
            )
        stored = {} if keep is None or entries.skipped_files else await keep(report)
        return print_outcome(
            console,
            fetching,
            self._dest,
            report,
            outcome.removed,
            mirror.destination.changes + outcome.is_new,
            index_bytes=outcome.index_bytes,
            skipped=entries.skipped_files,
            unmatched=unmatched,
            **further,
            **stored,
        )

    async def run(self, reactor: Any, console: Console, grid: Grid | None = None) -> int:
        """Do the work, or the rest of the work that ``early`` began."""
        from twisted.internet.defer import Deferred

        begun = self._begun
        dest: str | destination.Destination = self._dest if begun is None else begun[1].destination
        async with self._fetching.mirror(reactor, console, dest) as (mirror, _):
            if begun is None:
                return await self._work(
                    mirror, console, lambda report: store(mirror, grid, report, self._fetching)
                )
            begun[1].go_on(mirror)
            return await Deferred.fromCoroutine(begun[0])
