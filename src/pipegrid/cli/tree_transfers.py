"""``put -r`` and ``get -r``: the options that select files of a tree, and both transfers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from pipegrid.cli import cap_file, cap_lookup, progress_bar
from pipegrid.cli.cap_file import as_line
from pipegrid.cli.command_job import GridJob
from pipegrid.cli.console import read_given
from pipegrid.cli.error_report import ExitStatus, one_status, with_options
from pipegrid.cli.options import EMPTY_NAME, CapArguments, as_one, usage_error
from pipegrid.core.text import amount, counted, decode_text, printable
from pipegrid.errors import PipegridError, SourceError
from pipegrid.tree import file_selection, tree_upload

if TYPE_CHECKING:
    from pipegrid.cli.console import Console
    from pipegrid.tree.directory_descriptor import DirectoryFd
    from pipegrid.tree.file_metadata import Modes
    from pipegrid.tree.grid_api import Grid
    from pipegrid.tree.tree_download import TreeGetResult
    from pipegrid.tree.tree_upload import TreeCounts


# ``get -r``: a whole directory into a local one.

MAX_NOTED = 20
"""Files without their mode or time that are reported each; all are counted."""


class TreeOptions(NamedTuple):
    """How a tree is fetched; see ``Grid.tree.get_tree``."""

    force: bool = False
    paranoid: bool = False
    modes: Modes = "umask"
    max_paths: int | None = None


def tree_job(
    named: CapArguments, output: str | None, byte_range: str | None, options: TreeOptions
) -> GridJob:
    """
    Return the job of fetching one tree.

    Raises:
        click.UsageError: the arguments are invalid.
    """
    caps, cap_files = named
    if len(caps) != 1 or cap_files:
        raise usage_error("--recursive takes one CAP, or CAP/some/path")
    if output is None:
        raise usage_error("--recursive needs a directory to write to; add -o DIR")
    if output == "":
        raise usage_error(f"-o: {EMPTY_NAME}")
    if byte_range is not None:
        raise usage_error("--range is for one file; leave out --recursive")
    directory = output

    async def work(grid: Grid, console: Console) -> int:
        place = await cap_lookup.directory_at(grid, caps[0])
        return await fetch_tree(grid, console, place.cap, directory, options, place.metadata_json)

    return GridJob(work, *caps)


async def fetch_tree(
    grid: Grid,
    console: Console,
    cap: object,
    directory: str,
    options: TreeOptions,
    metadata_json: bytes,
    into: DirectoryFd | None = None,
) -> ExitStatus:
    """
    Fetch a tree, and report the outcome; returns the status of its failures, or 1 if they differ.

    Args:
        metadata_json, into: see ``Grid.tree.get_tree``.
    """
    statuses: set[ExitStatus] = set()

    def problem(path: tuple[str, ...], error: Exception) -> None:
        statuses.add(console.failed(error, cap_lookup.shown_path(path), {"path": list(path)}))

    def done(path: tuple[str, ...], how: str, size: int) -> None:
        if console.json:
            console.result("", {"path": list(path), "outcome": how, "size": size})
        else:
            console.detail(f"{cap_lookup.shown_path(path)}: {how}")

    noted = 0

    def not_kept(path: tuple[str, ...], why: str) -> None:
        nonlocal noted
        noted += 1
        if noted <= MAX_NOTED:
            console.say(f"pipegrid: {cap_lookup.shown_path(path) or '.'}: {why}")

    with progress_bar.ProgressBar(console, "get") as progress:
        result = await grid.tree.get_tree(
            cap,  # type: ignore[arg-type]
            directory,
            metadata_json=metadata_json,
            progress=progress.transfer(),
            problem=problem,
            done=done,
            into=into,
            waiting=progress_bar.waiting_of(console, progress),
            not_kept=not_kept,
            **options._asdict(),
        )
    _print_result(console, directory, result)
    return one_status(statuses)


def _print_result(console: Console, directory: str, result: TreeGetResult) -> None:
    """Report what was fetched, and what is missing."""
    fields = {
        "directory": directory,
        "files": result.files,
        "present": result.present,
        "directories": result.directories,
        "links": result.links,
        "size": result.size,
        "fetched_bytes": result.fetched_bytes,
        "second_tries": result.second_tries,
        "failed": result.failed,
        "part_files": result.part_files,
        "not_kept": result.not_kept,
    }
    if console.json:
        console.result("", fields)
    else:
        there = f", {counted(result.present, 'was', 'were')} there" if result.present else ""
        links = f", {counted(result.links, 'link')}" if result.links else ""
        left_out = f"; {result.failed} left out" if result.failed else ""
        if result.part_files:
            left_out += f"; skipped {counted(result.part_files, 'part file')}"
        if result.not_kept:
            left_out += f"; {result.not_kept} without the mode or time that was stored"
        if result.second_tries:
            left_out = f"; {progress_bar.retried_note(result.second_tries)}{left_out}"
        size = amount(result.fetched_bytes)
        fetched = f"{counted(result.files, 'file')} fetched ({size}){there}{links}"
        directories = counted(result.directories, "directory", "directories")
        console.say(f"pipegrid: {fetched}, in {directories}{left_out}")


# Storing whole directories: the common part of ``put -r`` and ``backup``.

F = TypeVar("F", bound=Callable[..., Any])

MAX_LIST_BYTES = 64 << 20
MAX_UNMATCHED = 20
"""Patterns that matched nothing, which are reported each."""


selection_options = as_one(
    "selection",
    dict,
    click.option(
        "--one-file-system",
        is_flag=True,
        help="Store what is mounted within the directory as an empty directory.",
    ),
    click.option(
        "--strict",
        is_flag=True,
        help="Exit with 1 also if named pipes, sockets or devices were skipped.",
    ),
    click.option(
        "--files-from",
        type=click.Path(allow_dash=True, readable=False),
        metavar="FILE",
        help="Store only what FILE lists, one path per line, below the directory or absolute; "
        "'-' is standard input.",
    ),
    click.option(
        "--exclude-vcs",
        is_flag=True,
        help="Leave out where version control keeps its own: .git, .hg, .svn and the like.",
    ),
    click.option(
        "--exclude-from",
        multiple=True,
        type=click.Path(readable=False),
        metavar="FILE",
        help="Leave out what the patterns in FILE match, one per line.",
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="GLOB",
        help="Leave out what matches: names anywhere ('*.tmp'), or with a slash paths below the "
        "directory ('build/*.o', '**/cache/'); a slash at the end means directories only.",
    ),
)
"""Which files of a directory are stored; ``SelectionOptions`` takes them."""


class SelectionOptions:
    """
    The values of ``selection_options``.

    Attributes:
        one_file_system: store mounted directories as empty ones.
        strict: skipped special files change the status.

    Raises:
        UsageError: a pattern is invalid.
        SourceError: a file of patterns or paths cannot be read.
    """

    def __init__(
        self,
        exclude: tuple[str, ...],
        exclude_from: tuple[str, ...],
        exclude_vcs: bool,
        files_from: str | None,
        one_file_system: bool,
        strict: bool,
    ) -> None:
        self._given_in = dict.fromkeys(exclude, "--exclude")
        patterns = list(exclude)
        for path in exclude_from:
            for number, pattern in file_selection.patterns_of(_text_of(path)):
                self._given_in.setdefault(pattern, f"{printable(path)}:{number}")
                patterns.append(pattern)
        if exclude_vcs:
            patterns += file_selection.VCS
        self._unmatched = set(self._given_in)
        self._made: file_selection.TreeSelection | None = None
        file_selection.TreeSelection(patterns)  # reports invalid patterns now
        self.one_file_system = one_file_system
        self.strict = strict
        self._patterns = patterns
        self._lines = None if files_from is None else _text_of(files_from).split("\n")

    def of(self, directory: str) -> Callable[[], file_selection.TreeSelection]:
        """
        Return a function that makes the selection for one walk through a directory.

        Raises:
            UsageError: a listed path is not below it.
        """
        only = None
        if self._lines is not None:
            only = file_selection.paths_below(os.path.abspath(directory), self._lines)
        file_selection.TreeSelection(self._patterns, only)

        def make() -> file_selection.TreeSelection:
            self._note_unmatched()
            self._made = file_selection.TreeSelection(self._patterns, only)
            return self._made

        return make

    def _note_unmatched(self) -> None:
        if self._made is not None:
            self._unmatched.intersection_update(self._made.unmatched)

    def status_of(self, counts: TreeCounts) -> ExitStatus:
        """Return the status of a stored tree, by what was left out."""
        failed = counts.left_out or (self.strict and counts.skipped)
        return ExitStatus.FAILED if failed else ExitStatus.DONE

    def report_unmatched(self, console: Console) -> None:
        """Report the patterns that have matched nothing in any walk."""
        self._note_unmatched()
        unmatched = [each for each in self._given_in if each in self._unmatched]
        for pattern in unmatched[:MAX_UNMATCHED]:
            where = self._given_in[pattern]
            console.say(f"pipegrid: {where}: the pattern '{printable(pattern)}' matched nothing")
        if len(unmatched) > MAX_UNMATCHED:
            more = len(unmatched) - MAX_UNMATCHED
            console.say(f"pipegrid: {more} more patterns matched nothing")


def _text_of(path: str) -> str:
    if path == "":
        raise usage_error(f"FILE: {EMPTY_NAME}")
    try:
        stdin = None if sys.stdin is None else sys.stdin.buffer
        data = read_given(path, stdin, MAX_LIST_BYTES + 1)
    except OSError as error:
        raise SourceError(f"cannot read {printable(path)}: {error.strerror}") from error
    if len(data) > MAX_LIST_BYTES:
        raise SourceError(
            f"{printable(path)} has more than {MAX_LIST_BYTES >> 20} MiB; list directories instead"
        )
    return decode_text(data, "standard input" if path == "-" else printable(path))


def reports_of(console: Console, progress: Any) -> tree_upload.TreeReports:
    """Return the functions that report each left-out file on a line, and move the bar."""

    def left_out(path: str, why: str) -> None:
        why = with_options(why, ("less with happy",))
        console.fault(f"pipegrid: {printable(path)}: left out: {printable(why)}")
        console.json_result({"path": path, "error": why, "exit_status": int(ExitStatus.FAILED)})

    def skipped(path: str, what: str) -> None:
        console.detail(f"{printable(path)}: skipped: it is {what}")
        console.json_result({"path": path, "skipped": what})

    waiting = progress_bar.waiting_of(console, progress)
    if not progress.is_wanted:
        return tree_upload.TreeReports(left_out, waiting=waiting, skipped=skipped)
    bar = progress.upload(None)
    sending_bytes = 0

    def moved(counts: TreeCounts) -> None:
        unchanged = counts.unchanged_bytes
        bar.found(unchanged, counts.bytes)
        bar.sent(min(unchanged + counts.sent_bytes + sending_bytes, counts.bytes), counts.bytes)

    def sending(counts: TreeCounts, more: int) -> None:
        nonlocal sending_bytes
        sending_bytes += more
        if more > 0:  # otherwise the result follows at once
            moved(counts)

    return tree_upload.TreeReports(left_out, moved, sending, waiting, skipped)


def counts_of(counts: TreeCounts) -> str:
    """Return a summary of what was found, sent and left out."""
    directories = counted(counts.directories, "directory", "directories")
    sent_directories = counted(counts.sent_directories, "directory", "directories")
    links = f", {counted(counts.links, 'link')}" if counts.links else ""
    there = (
        f", {counts.already_stored} of which servers had already" if counts.already_stored else ""
    )
    checked = f"; {counted(counts.checked, 'object')} checked" if counts.checked else ""
    if counts.unleased:
        checked += f", {counts.unleased} of them without leases, which too few servers gave"
    left_out = f"; {counts.left_out} left out" if counts.left_out else ""
    if counts.skipped:
        specials = counted(counts.skipped, "pipe, socket or device", "pipes, sockets or devices")
        left_out += f"; skipped {specials}"
    if counts.part_files:
        left_out += f"; skipped {counted(counts.part_files, 'part file')}"
    if counts.second_tries:
        left_out = f"; {progress_bar.retried_note(counts.second_tries)}{left_out}"
    return (
        f"{counted(counts.files, 'file')} ({amount(counts.bytes)}) in {directories}{links}; sent "
        f"{counted(counts.sent_files, 'file')} and {sent_directories} "
        f"({amount(counts.sent_bytes)}){there}{checked}{left_out}"
    )


def fields_of(counts: TreeCounts) -> dict[str, int]:
    """Return the documented JSON form of the same."""
    import attrs

    return attrs.asdict(counts)


async def put_trees(
    grid: Grid,
    console: Console,
    directories: tuple[str, ...],
    chosen: SelectionOptions,
    options: dict[str, Any],
    with_names: bool,
) -> int:
    """Store directories, one after the other, and print their caps; returns the exit status."""
    statuses: set[ExitStatus] = set()
    all_met = True
    for directory in directories:
        try:
            selection = chosen.of(directory)()
            with progress_bar.ProgressBar(console, "put") as progress:
                result = await grid.tree.put_tree(
                    directory,
                    selection=selection,
                    one_file_system=chosen.one_file_system,
                    reports=reports_of(console, progress),
                    **options,
                )
        except PipegridError as error:
            statuses.add(console.failed(error, printable(directory), {"path": directory}))
            all_met = False
            continue
        cap = str(result.cap)
        console.say(f"pipegrid: {printable(directory)}: {counts_of(result.counts)}")
        statuses.add(chosen.status_of(result.counts))
        fields = {
            "path": directory,
            "cap": cap,
            **fields_of(result.counts),
            "elapsed_s": result.elapsed_s,
        }
        text = as_line(cap, directory) if with_names else cap
        if options.get("random_key"):
            cap_file.print_cap(console, grid.config.directory, text, fields, cap, directory)
        else:
            console.result(text, fields)
    if all_met:
        chosen.report_unmatched(console)
    return one_status(statuses)
