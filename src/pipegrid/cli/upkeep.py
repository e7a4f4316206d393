"""What ``check``, ``renew`` and ``repair`` have in common when they look after many objects, or trees."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob, Invocation
from pipegrid.cli.options import CapArguments, upkeep_bounds
from pipegrid.cli.outcome import ExitStatus, sentence, worst_status
from pipegrid.core.text import counted, printable

if TYPE_CHECKING:
    from pipegrid.cli.files import NamedFile
    from pipegrid.grid import Grid
    from pipegrid.transfer.settings import UpkeepSettings
    from pipegrid.transfer.upkeep import UpkeepOutcome, UpkeepRequest, UpkeepSummary
    from pipegrid.tree.tree_check import FirstMet

MAX_NAMED = 20
"""Servers in a summary line."""


recursive_option = click.option(
    "-r",
    "--recursive",
    is_flag=True,
    help="Do it for everything in the directories, too, each object once, and sum up at the end; "
    "objects that are well, or lack nothing but servers that are down, are not listed without -v.",
)


def upkeep_job(
    invocation: Invocation,
    caps: CapArguments,
    recursive: bool,
    verb: str,
    todo: dict[str, bool],
    show: Callable[[Console, NamedFile[Any], Any, str], ExitStatus],
    alone: Callable[[Grid, Console, Any], Awaitable[Any]] | None,
) -> GridJob:
    """
    Return the job of looking after files, or after everything in directories.

    Args:
        caps: of ``checked_caps``.
        verb: for the progress bar.
        todo: what is to be done, as ``UpkeepRequest`` has it.
        show: prints what came of one, each line beginning with the text given; returns its status.
        alone: looks after one by its cap, if it is the only one; None: then it is as with many.
    """
    from pipegrid.cli.files import named_files, starts_of
    from pipegrid.core.caps import keepable, walkable

    understand: Callable[[Any], Any] = walkable if recursive else keepable
    files = named_files(invocation.console, *caps, understand)

    async def work(grid: Grid, console: Console) -> int:
        def shown(file: NamedFile[Any], outcome: Any) -> ExitStatus:
            lead = f"{file.label.removesuffix(':')}: " if recursive or len(files) > 1 else ""
            return show(console, file, outcome, lead)

        if len(files) == 1 and alone is not None and not recursive:
            from pipegrid.cli.trees import Locator

            file = await Locator(grid).located(files[0], keepable)
            return shown(file, await alone(grid, console, file.cap))
        from pipegrid.transfer.upkeep import UpkeepRequest

        bounds = upkeep_bounds(invocation)
        return await look_after(
            grid, console, files, UpkeepRequest(**todo), bounds, verb, shown, recursive
        )

    return GridJob(work, *starts_of(files))


async def located_files(
    grid: Grid, console: Console, files: Sequence[NamedFile[Any]], recursive: bool
) -> tuple[list[NamedFile[Any]], set[ExitStatus]]:
    """Follow the paths behind caps; one of several that leads nowhere is named, and left out."""
    from pipegrid.cli.files import identity
    from pipegrid.cli.trees import Locator
    from pipegrid.core.caps import keepable, walkable
    from pipegrid.errors import PipegridError

    found: list[NamedFile[Any]] = []
    statuses: set[ExitStatus] = set()
    locator = Locator(grid)
    for file in files:
        try:
            found.append(await locator.located(file, walkable if recursive else keepable))
        except PipegridError as error:  # noqa: PERF203
            if len(files) == 1:
                raise
            statuses.add(console.failed(error, file.label, identity(file), True))
    return found, statuses


class ObjectsReport:
    """
    Shows what comes of many objects, and remembers the worst.

    Args:
        show: prints what came of one that is no failure; returns its status.
        terse: objects that are well are not shown to people.
    """

    def __init__(
        self, console: Console, show: Callable[[NamedFile[Any], Any], ExitStatus], terse: bool
    ) -> None:
        self.console = console
        self.show = show
        self.terse = terse
        self.statuses: set[ExitStatus] = set()

    def note(self, file: NamedFile[Any], outcome: UpkeepOutcome) -> None:
        """Show what came of one file, a Failure too, and remember its exit status."""
        from twisted.python.failure import Failure

        from pipegrid.cli.files import identity

        if isinstance(outcome, Failure):
            error = outcome.value
            assert error is not None
            self.statuses.add(self.console.failed(error, file.label, identity(file)))
            return
        if self.terse and not self.console.json and self.console.verbosity <= 0:
            from pipegrid.cli.health import is_well, lacks_servers_only

            if is_well(outcome):
                self.statuses.add(ExitStatus.DONE)
                return
            if lacks_servers_only(outcome):  # the sum says so once, with the servers
                self.statuses.add(ExitStatus.FAILED)
                return
        self.statuses.add(self.show(file, outcome))

    def unreadable(self, file: NamedFile[Any], error: Exception) -> None:
        """Name a directory that was not entered."""
        what = (
            f"{file.label} was not entered, so nothing is known of what is in it: {sentence(error)}"
        )
        self.statuses.add(ExitStatus.FAILED)
        if self.console.json:
            from pipegrid.cli.files import identity

            self.console.result("", {**identity(file), "unreadable": sentence(error)})
        else:
            self.console.fault(f"pipegrid: {what}")

    @property
    def worst(self) -> ExitStatus:
        """The gravest status of all."""
        return worst_status(self.statuses)


async def look_after(
    grid: Grid,
    console: Console,
    files: Sequence[NamedFile[Any]],
    todo: UpkeepRequest,
    bounds: UpkeepSettings,
    verb: str,
    show: Callable[[NamedFile[Any], Any], ExitStatus],
    recursive: bool,
) -> ExitStatus:
    """
    Look after files, or everything in directories, and show each outcome and the sum.

    Args:
        files: those that the user named.
        verb: for the progress bar.
        show: see ``ObjectsReport``.

    Returns:
        The gravest status.
    """
    from pipegrid.cli.progress import ProgressBar
    from pipegrid.cli.waiting import waiting_of

    summary: UpkeepSummary
    report = ObjectsReport(console, show, recursive)
    named = len(files)
    files, report.statuses = await located_files(grid, console, files, recursive)
    with ProgressBar(console, verb, "object") as progress:
        told = progress.transfer()

        def count(done: int, total: int) -> None:
            if told is not None:
                told(done, total)

        if recursive:
            waiting = waiting_of(console, progress)
            summary = await _trees(grid, files, todo, bounds, report, count, waiting)
        else:
            summary = await _many(grid, files, todo, bounds, report, count)
    summary.objects += named - len(files)
    summary.failed += named - len(files)
    text, fields = sum_up(summary, todo)
    if console.json or recursive:
        console.result(text, {"summary": fields})
    else:
        console.say(f"pipegrid: {text}")
    return report.worst


async def _many(
    grid: Grid,
    files: Sequence[NamedFile[Any]],
    todo: UpkeepRequest,
    bounds: UpkeepSettings,
    report: ObjectsReport,
    count: Callable[[int, int], None],
) -> UpkeepSummary:
    from pipegrid.transfer.upkeep import UpkeepSummary

    summary = UpkeepSummary()

    def ended(number: int, outcome: UpkeepOutcome) -> None:
        summary.note(outcome)
        count(summary.objects, len(files))
        report.note(files[number], outcome)

    await grid._look_after([file.cap for file in files], todo, bounds, ended)
    return summary


async def _trees(
    grid: Grid,
    files: Sequence[NamedFile[Any]],
    todo: UpkeepRequest,
    bounds: UpkeepSettings,
    report: ObjectsReport,
    count: Callable[[int, int], None],
    waiting: Callable[[str | None], None],
) -> UpkeepSummary:
    from pipegrid.cli.files import NamedFile
    from pipegrid.tree.tree_check import TreeSummary, check_trees

    summary = TreeSummary()

    def named(root: int, place: FirstMet) -> NamedFile[Any]:
        path = "/".join(place.path)
        if len(files) > 1 or not path:
            path = _below(files[root].label, path)
        text = files[root].text if not place.path else "" if place.cap is None else str(place.cap)
        return NamedFile(text, place.cap, path)

    def ended(root: int, place: FirstMet, outcome: UpkeepOutcome) -> None:
        count(summary.objects, 0)
        report.note(named(root, place), outcome)

    def unreadable(root: int, place: FirstMet, error: Exception) -> None:
        report.unreadable(named(root, place), error)

    await check_trees(
        grid,
        [file.cap for file in files],
        todo,
        summary,
        bounds=bounds,
        ended=ended,
        unreadable=unreadable,
        waiting=waiting,
    )
    return summary


def _below(root: str, path: str) -> str:
    """Return a path below something that people call so, which may be ``ALIAS:``."""
    if not path:
        return root
    return f"{root}{path}" if root.endswith((":", "/")) else f"{root}/{path}"


def sum_up(summary: UpkeepSummary, todo: UpkeepRequest) -> tuple[str, dict[str, Any]]:
    """Return the sum in one line, and its documented JSON form."""
    import attrs

    from pipegrid.cli.waiting import retried_note

    fields = attrs.asdict(summary)
    fields["unreachable"] = dict(sorted(summary.unreachable.items()))
    well = "renewed" if todo.renew else "healthy"
    parts = [f"{counted(summary.objects, 'object')}: {summary.healthy} {well}"]
    for name, what in (
        ("repaired", "repaired"),
        ("damaged", "damaged"),
        ("unspread", "on too few servers"),
        ("reachable", "reachable"),
        ("lost", "lost or unavailable" if summary.unreachable else "lost"),
        ("leaseless", "without some lease"),
        ("failed", "failed"),
    ):
        if fields.get(name):
            parts.append(f"{fields[name]} {what}")
    if fields.get("unreadable"):
        unreadable = counted(fields["unreadable"], "directory", "directories")
        parts.append(f"{unreadable} not entered")
    if fields.get("second_tries"):
        parts.append(retried_note(fields["second_tries"]))
    if summary.wanted_shares:
        have = "have a lease" if todo.renew else "good"
        shares = counted(summary.wanted_shares, "share")
        parts.append(f"{summary.good_shares} of {shares} {have}")
    servers = sorted(summary.unreachable)
    if servers:
        more = f" and {len(servers) - MAX_NAMED} more" if len(servers) > MAX_NAMED else ""
        names = ", ".join(printable(name) for name in servers[:MAX_NAMED])
        parts.append(f"{'server' if len(servers) == 1 else 'servers'} down: {names}{more}")
    return "; ".join([", ".join(parts[:-1]), parts[-1]]) if servers else ", ".join(parts), fields
