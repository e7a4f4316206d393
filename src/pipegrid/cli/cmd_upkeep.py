"""``pipegrid check``, ``repair`` and ``renew``: check and maintain the shares of files."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import date, timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipegrid.cli import cap_lookup, health_output, progress_bar
from pipegrid.cli.command_job import GridJob, Invocation
from pipegrid.cli.console import Console, grouped, say_some
from pipegrid.cli.error_report import ExitStatus, sentence, worst_status
from pipegrid.cli.health_output import are_down, fields, lost, say_more, summary
from pipegrid.cli.options import (
    CapArguments,
    cap_arguments,
    grid_options,
    limit_options,
    reading_options,
    upkeep_bounds,
    usage_error,
)
from pipegrid.core import caps as core_caps
from pipegrid.core.text import counted, printable
from pipegrid.errors import PipegridError, UsageError
from pipegrid.transfer import results, upkeep, verification_rotation
from pipegrid.tree import tree_check

if TYPE_CHECKING:
    from pipegrid.cli.cap_lookup import NamedFile
    from pipegrid.grid import Grid
    from pipegrid.transfer.settings import UpkeepSettings
    from pipegrid.transfer.upkeep import UpkeepOutcome, UpkeepRequest, UpkeepSummary


# The code that ``check``, ``renew`` and ``repair`` share for many objects or trees.

MAX_NAMED = 20
"""How many servers a summary line names."""


recursive_option = click.option(
    "-r",
    "--recursive",
    is_flag=True,
    help="Include everything in the directories, each object once, and print totals at the end. Objects "
    "that are healthy, or only wait for servers that are down, are listed only with -v.",
)


class UpkeepOptions(NamedTuple):
    """
    How ``maintain`` processes objects.

    Attributes:
        verb: the word for the work in the progress bar.
        recursive: whether everything in directories is processed.
        todo: the work for each object.
        bounds: how many objects and bytes are processed at the same time.
    """

    verb: str
    recursive: bool
    todo: UpkeepRequest
    bounds: UpkeepSettings


class UpkeepWork(NamedTuple):
    """
    What a command does to each object.

    Attributes:
        verb: the word for the work in the progress bar.
        todo: the fields of ``UpkeepRequest``.
        show: prints one outcome, each line beginning with the given text; returns the outcome's status.
        alone: processes the cap of the only object of a command; None: it is processed like one of many.
        sample: percentage of the objects to verify, different ones in each run; None: do not sample.
    """

    verb: str
    todo: dict[str, bool]
    show: Callable[[Console, NamedFile[Any], Any, str], ExitStatus]
    alone: Callable[[Grid, Console, Any], Awaitable[Any]] | None
    sample: Fraction | None = None


def upkeep_job(
    invocation: Invocation, caps: CapArguments, recursive: bool, each: UpkeepWork
) -> GridJob:
    """
    Return the job that checks or maintains files, or everything in directories.

    Args:
        caps: the result of ``checked_caps``.
    """
    verb, todo, show, alone, sample = each
    understand: Callable[[Any], Any] = core_caps.walkable if recursive else core_caps.keepable
    files = cap_lookup.named_files(invocation.console, *caps, understand)

    async def work(grid: Grid, console: Console) -> int:
        def shown(file: NamedFile[Any], outcome: Any) -> ExitStatus:
            lead = f"{file.label.removesuffix(':')}: " if recursive or len(files) > 1 else ""
            return show(console, file, outcome, lead)

        if len(files) == 1 and alone is not None and not recursive:
            file = await cap_lookup.Locator(grid).located(files[0], core_caps.keepable)
            return shown(file, await alone(grid, console, file.cap))

        part, request = None, upkeep.UpkeepRequest(**todo)
        if sample is not None:
            part = SampledPart(grid, console, (caps, recursive), sample)
            request = upkeep.SampledUpkeep(**todo, part=part.part)
        options = UpkeepOptions(verb, recursive, request, upkeep_bounds(invocation))
        status = await maintain(grid, console, files, options, shown)
        if part is not None:
            part.finish()
        return status

    return GridJob(work, *cap_lookup.starts_of(files))


class SampledPart:
    """
    The part of the objects that this run verifies.

    Args:
        key: the arguments of the check, which identify its round of runs.
        percent: percentage of the objects to verify.

    Raises:
        UsageError, SinkError: the state of the round cannot be stored.
    """

    def __init__(self, grid: Grid, console: Console, key: object, percent: Fraction) -> None:
        config = grid.config
        directory = config.state or next(iter(config.caches), None)
        if directory is None:
            raise UsageError(f"{config.directory} has no place for the state of --sample")
        self._console = console
        self._percent = percent
        self._rounds = verification_rotation.VerificationRounds(directory, key)
        if self._rounds.warning:
            console.note(self._rounds.warning)
        width = verification_rotation.width_of(percent)
        self.part = verification_rotation.VerifiedPart(self._rounds.state.position, width)

    def finish(self) -> None:
        """
        Record the part as verified, and report how long the round will still last.

        If no server had a share of any object, the part is not recorded, and the next run verifies it:
        otherwise a night without a network would leave objects unverified for a whole round.
        """
        if not self.part.was_reached:
            self._console.note(
                "no server had a share of anything, so no part was verified; the next run tries "
                "the same one"
            )
            return
        state = self._rounds.finish(self.part.width)
        left = state.runs_left(self.part.width)
        until = date.today() + timedelta(days=left)
        count, percent = self.part.verified, float(self._percent)
        fields = {"percent": percent, "verified": count, "runs_left": left, "until": f"{until}"}
        ends = f"{counted(left, 'run')}: if they are nightly, until {until}"
        what = f"this round lasts another {ends}"
        if not state.covered:
            what = f"every object has been verified; the next round lasts {ends}"
        self._console.note(f"verified another {percent:g}%: {counted(count, 'object')}; {what}")
        self._console.json_result({"sample": fields})


def sampled_percent(text: str) -> Fraction:
    """
    Parse a percentage such as ``3%`` or ``0.5``.

    Raises:
        click.BadParameter: the text is not a percentage from 0.01 to 100.
    """
    match = re.fullmatch(r"\s*([0-9]{1,3}(?:\.[0-9]{1,2})?)\s*%?\s*", text)
    percent = Fraction(0) if match is None else Fraction(match[1])
    if not 0 < percent <= 100:
        raise click.BadParameter(f"{text!r} is not a percentage from 0.01 to 100, such as 3%")
    return percent


async def located_files(
    grid: Grid, console: Console, files: Sequence[NamedFile[Any]], recursive: bool
) -> tuple[list[NamedFile[Any]], set[ExitStatus]]:
    """
    Follow the paths after caps; return the files that exist, and the statuses of the others.

    If there is only one file, its failure is raised.
    """
    found: list[NamedFile[Any]] = []
    statuses: set[ExitStatus] = set()
    locator = cap_lookup.Locator(grid)
    for file in files:
        try:
            found.append(
                await locator.located(file, core_caps.walkable if recursive else core_caps.keepable)
            )
        except PipegridError as error:  # noqa: PERF203
            if len(files) == 1:
                raise
            statuses.add(console.failed(error, file.label, cap_lookup.identity(file), True))
    return found, statuses


class ObjectsReport:
    """
    Shows the outcomes of many objects, and collects their exit statuses.

    Args:
        show: prints an outcome that is not a failure; returns the outcome's status.
        terse: whether to leave out healthy objects in the output for people.
    """

    def __init__(
        self, console: Console, show: Callable[[NamedFile[Any], Any], ExitStatus], terse: bool
    ) -> None:
        self.console = console
        self.show = show
        self.terse = terse
        self.statuses: set[ExitStatus] = set()

    def note(self, file: NamedFile[Any], outcome: UpkeepOutcome) -> None:
        """Show the outcome of one file, or its Failure, and record its exit status."""
        from twisted.python.failure import Failure

        if isinstance(outcome, Failure):
            error = outcome.value
            assert error is not None
            self.statuses.add(self.console.failed(error, file.label, cap_lookup.identity(file)))
            return
        if self.terse and not self.console.json and self.console.verbosity <= 0:
            if health_output.is_well(outcome):
                self.statuses.add(ExitStatus.DONE)
                return
            # The summary names the servers that are down, once for all objects.
            if health_output.lacks_servers_only(outcome):
                self.statuses.add(ExitStatus.FAILED)
                return
        self.statuses.add(self.show(file, outcome))

    def unreadable(self, file: NamedFile[Any], error: Exception) -> None:
        """Report a directory that could not be read."""
        why = sentence(error)
        self.statuses.add(ExitStatus.FAILED)
        if self.console.json:
            self.console.result("", {**cap_lookup.identity(file), "unreadable": why})
        else:
            self.console.fault(
                f"{file.label} could not be read, so its entries were not processed: {why}"
            )


async def maintain(
    grid: Grid,
    console: Console,
    files: Sequence[NamedFile[Any]],
    options: UpkeepOptions,
    show: Callable[[NamedFile[Any], Any], ExitStatus],
) -> ExitStatus:
    """
    Process files, or everything in directories, and show each outcome and the summary.

    Args:
        files: the files that the user named.
        show: see ``ObjectsReport``.

    Returns:
        The worst status.
    """
    verb, recursive, todo, bounds = options
    report = ObjectsReport(console, show, recursive)
    named = len(files)
    files, report.statuses = await located_files(grid, console, files, recursive)
    with progress_bar.ProgressBar(console, verb, "object") as progress:
        count = progress.transfer() or _count_nothing
        if recursive:
            waiting = progress_bar.waiting_of(console, progress)
            summary = await _trees(grid, files, todo, bounds, report, count, waiting)
        else:
            summary = await _many(grid, files, todo, bounds, report, count)
    summary.objects += named - len(files)
    summary.failed += named - len(files)
    todo.note_summary(summary)
    text, fields = sum_up(summary, todo)
    if console.json or recursive:
        console.result(text, {"summary": fields})
    else:
        console.note(text)
    return worst_status(report.statuses)


def _count_nothing(done: int, total: int) -> None:
    """Do nothing; used if there is no progress bar."""


async def _many(
    grid: Grid,
    files: Sequence[NamedFile[Any]],
    todo: UpkeepRequest,
    bounds: UpkeepSettings,
    report: ObjectsReport,
    count: Callable[[int, int], None],
) -> upkeep.UpkeepSummary:
    summary = upkeep.UpkeepSummary()

    def ended(number: int, outcome: UpkeepOutcome) -> None:
        summary.note(outcome)
        count(summary.objects, len(files))
        report.note(files[number], outcome)

    await grid._maintain([file.cap for file in files], todo, bounds, ended)
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
    summary = tree_check.TreeSummary()

    def named(root: int, place: tree_check.FirstMet) -> NamedFile[Any]:
        path = "/".join(place.path)
        if len(files) > 1 or not path:
            path = _below(files[root].label, path)
        text = files[root].text if not place.path else "" if place.cap is None else str(place.cap)
        return cap_lookup.NamedFile(text, place.cap, path)

    def ended(root: int, place: tree_check.FirstMet, outcome: UpkeepOutcome) -> None:
        count(summary.objects, 0)
        report.note(named(root, place), outcome)

    def unreadable(root: int, place: tree_check.FirstMet, error: Exception) -> None:
        report.unreadable(named(root, place), error)

    reports = tree_check.CheckReports(ended, unreadable, waiting)
    caps = [file.cap for file in files]
    await tree_check.check_trees(grid, caps, todo, summary, bounds=bounds, reports=reports)
    return summary


def _below(root: str, path: str) -> str:
    """Join a root as the user wrote it, such as ``ALIAS:``, and a path below the root."""
    if not path:
        return root
    return f"{root}{path}" if root.endswith((":", "/")) else f"{root}/{path}"


def sum_up(summary: UpkeepSummary, todo: UpkeepRequest) -> tuple[str, dict[str, Any]]:
    """Return the summary as one line, and as the fields that the docs describe for JSON."""
    import attrs

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
        parts.append(f"{unreadable} unreadable")
    if fields.get("second_tries"):
        parts.append(progress_bar.retried_note(fields["second_tries"]))
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


# ``pipegrid check``: reports whether files still have all their shares.


@click.command(name="check")
@cap_arguments
@recursive_option
@click.option("--verify", is_flag=True, help="Fetch all shares and verify every byte.")
@click.option(
    "--sample",
    type=sampled_percent,
    metavar="PERCENT",
    help="Check all objects, and verify every byte of PERCENT of them, such as 3%: of another part in each "
    "run, until all were verified.",
)
@click.option(
    "--add-lease",
    is_flag=True,
    help="Add a lease to the good shares, or renew it, as 'renew' does.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="Make missing shares again, if enough are left, and spread files that are on fewer servers than "
    "possible. Without --verify, shares that servers list count as good until they are fetched.",
)
@limit_options
@grid_options
@click.pass_obj
def check_command(
    invocation: Invocation,
    caps: CapArguments,
    recursive: bool,
    verify: bool,
    sample: Fraction | None,
    add_lease: bool,
    repair: bool,
) -> GridJob:
    """
    Report how many shares of files are left, and whether they are on as many servers as possible.

    '-' reads caps from standard input. Many files are checked together, and reported as servers answer. A
    file is 'reachable' if only shares on servers that are down are missing, and 'on too few servers' if
    further reachable servers could hold a share: --repair changes that. The exit status is 0 if all shares
    exist, on as many servers as possible, 1 if some are missing or on too few servers, 3 if servers did not
    take what a repair made, 4 if too few are left to restore the file, 5 if some are damaged; with several
    files, the worst of these: 4, 5, 3, 1, 0.
    """

    def show(
        console: Console,
        file: NamedFile[Any],
        result: results.CheckResult | results.RepairResult,
        lead: str,
    ) -> ExitStatus:
        if isinstance(result, results.RepairResult):
            return report_repair(console, file, result, lead)
        print_check(console, file, result, lead, add_lease)
        return status(result)

    async def alone(grid: Grid, console: Console, cap: Any) -> results.CheckResult:
        with progress_bar.ProgressBar(console, "check", "share") as progress:
            call = progress.transfer()
            return await grid.check(cap, verify=verify, add_lease=add_lease, progress=call)

    if verify and sample is not None:
        raise usage_error("--verify verifies everything; choose one of --verify and --sample")
    sampled = sample is not None
    todo = {"verify": verify or sampled, "add_lease": add_lease, "repair": repair}
    only = None if repair or sampled else alone
    work = UpkeepWork("check", todo, show, only, sample)
    return upkeep_job(invocation, caps, recursive, work)


def print_check(
    console: Console, file: NamedFile[Any], result: results.CheckResult, lead: str, add_lease: bool
) -> None:
    """Print the result for one file, and why leases could not be renewed."""
    leases = {"renewed": result.renewed, "lease_problems": result.lease_problems}
    more = leases if add_lease else {}
    console.result(lead + summary(result), {**cap_lookup.identity(file), **fields(result), **more})
    if not console.json:
        say_more(console, result, lead)
    say_some(console, [f"{lead}no lease: {reason}" for reason in grouped(result.lease_problems)])


def status(result: results.CheckResult) -> ExitStatus:
    """Return the exit status for a result; if several apply, the worst."""
    if not result.recoverable:
        return ExitStatus.NOT_ENOUGH_SHARES
    if result.corrupt and not result.healthy:
        return ExitStatus.CORRUPTION  # a damaged copy next to a good one does no harm
    return ExitStatus.DONE if result.healthy and not result.lease_problems else ExitStatus.FAILED


# ``pipegrid repair``: restores missing shares of files.


@click.command(name="repair")
@cap_arguments
@recursive_option
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="For mutable files and directories: write the newest readable version again, even if a newer "
    "version, or another one as new, is lost.",
)
@limit_options
@reading_options
@click.pass_obj
def repair_command(
    invocation: Invocation, caps: CapArguments, recursive: bool, force: bool
) -> GridJob:
    """
    Repair files: make missing or damaged shares again, and spread them over the servers.

    All shares are fetched and every byte of them is checked; good ones stay where they are, and their
    leases are renewed. A server without a good share gets one. A verifier cap is enough, but to repair a
    mutable file takes its write cap; '-' reads caps from standard input. The exit status is 0 if every
    share exists now, on as many servers as possible, 3 if servers did not take some, 4 if too few are left
    to restore the file; with several files, the worst of these: 4, 3, 0. 'check --repair' fetches less: it
    trusts the servers' lists of shares, and fetches those of damaged files alone.
    """

    def show(
        console: Console,
        file: NamedFile[Any],
        result: results.CheckResult | results.RepairResult,
        lead: str,
    ) -> ExitStatus:
        if isinstance(result, results.CheckResult):  # an object with a literal cap
            result = results.RepairResult(result.cap, result, result, {}, [], [], 0.0)
        return report_repair(console, file, result, lead)

    async def alone(grid: Grid, console: Console, cap: Any) -> results.RepairResult:
        with progress_bar.ProgressBar(console, "repair") as progress:
            return await grid.repair(cap, progress=progress.transfer(), force=force)

    todo = {"verify": True, "repair": True, "force": force}
    return upkeep_job(invocation, caps, recursive, UpkeepWork("repair", todo, show, alone))


def report_repair(
    console: Console, file: NamedFile[Any], result: results.RepairResult, lead: str = ""
) -> ExitStatus:
    """Print the outcome of a repair, each line beginning with ``lead``."""
    console.result(
        lead + _outcome(result),
        {
            **cap_lookup.identity(file),
            "before": fields(result.before),
            "after": fields(result.after),
            "uploaded": result.uploaded,
            "renewed": result.renewed,
            "reasons": result.reasons,
            "elapsed_s": result.elapsed_s,
        },
    )
    if not console.json:
        say_more(console, result.before, lead)
        for number, server in result.uploaded.items():
            console.detail(f"{lead}share {number} made again: {server}")
    if result.whole:
        return ExitStatus.DONE
    say_some(console, [lead + reason for reason in grouped(result.reasons)])
    return ExitStatus.UNHAPPY


def _outcome(result: results.RepairResult) -> str:
    after = result.after
    if after.total_shares == 0:
        return summary(after)
    made = counted(len(result.uploaded), "share")
    if not result.whole:
        state = f"not repaired: {made} made again, but more servers must take shares"
    elif result.uploaded:
        state = f"repaired: {made} made again"
    else:
        state = "healthy: nothing to repair"
    text = (
        f"{state}; {len(after.good_shares)} of {counted(after.total_shares, 'share')} good, "
        f"happiness {after.happiness}"
    )
    return f"{text}; {are_down(after.unreachable)}" if after.unreachable else text


# ``pipegrid renew``: makes servers keep the shares of files.


@click.command(name="renew")
@cap_arguments
@recursive_option
@limit_options
@grid_options
@click.pass_obj
def renew_command(invocation: Invocation, caps: CapArguments, recursive: bool) -> GridJob:
    """
    Add leases to the shares of files, or renew them, so that servers keep them.

    No share is read: each server gets one request. A verifier cap is enough; '-' reads caps from standard
    input. The exit status is 0 if all shares that were found have a lease now, 1 if some have none or
    servers were unreachable, 4 if those with a lease are too few to restore the file; with several files,
    the worst of these: 4, 1, 0.
    """

    async def alone(grid: Grid, console: Console, cap: Any) -> results.RenewResult:
        return await grid.renew(cap)

    work = UpkeepWork("renew", {"renew": True}, report_renewal, alone)
    return upkeep_job(invocation, caps, recursive, work)


def report_renewal(
    console: Console, file: NamedFile[Any], result: results.RenewResult, lead: str
) -> ExitStatus:
    """Print the outcome of a renewal, each line beginning with ``lead``."""
    console.result(
        lead + renewal_summary(result),
        {
            **cap_lookup.identity(file),
            "leases": result.leases,
            "required_shares": result.required_shares,
            "total_shares": result.total_shares,
            "unreachable": result.unreachable,
            "reasons": result.reasons,
        },
    )
    if result.unreachable:
        console.note(f"{lead}{are_down(result.unreachable)}")
    say_some(console, [f"{lead}no lease: {reason}" for reason in grouped(result.reasons)])
    for number, servers in result.leases.items():
        console.detail(f"{lead}share {number}: {', '.join(servers)}")
    if not result.recoverable:
        return ExitStatus.NOT_ENOUGH_SHARES
    return ExitStatus.FAILED if result.unreachable or result.reasons else ExitStatus.DONE


def renewal_summary(result: results.RenewResult) -> str:
    """Return the outcome of a renewal in one line."""
    if result.total_shares == 0:
        return "nothing to renew: the cap contains the file"
    servers = {server for holders in result.leases.values() for server in holders}
    text = (
        f"{len(result.leases)} of {counted(result.total_shares, 'share')} have a lease now, "
        f"on {counted(len(servers), 'server')}"
    )
    if not result.recoverable:
        return f"{lost(result)}: {text}; any {result.required_shares} restore the file"
    return f"renewed: {text}"
