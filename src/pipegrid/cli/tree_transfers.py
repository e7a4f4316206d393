"""Transfers of trees (``put -r`` and ``get -r``), and the options that select files of a tree."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipegrid.cli import cap_list_files, cap_lookup, progress_bar
from pipegrid.cli.command_job import GridJob
from pipegrid.cli.console import Console, read_given
from pipegrid.cli.error_report import ExitStatus, one_status, unreadable, with_options
from pipegrid.cli.options import EMPTY_NAME, CapArguments, as_one, byte_size, usage_error
from pipegrid.core.text import amount, counted, decode_text, printable
from pipegrid.errors import PipegridError, SourceError
from pipegrid.tree import file_selection, ignore_patterns, tree_upload

if TYPE_CHECKING:
    from pipegrid.tree.extended_metadata import MetadataLosses
    from pipegrid.tree.file_metadata import Modes
    from pipegrid.tree.local_directory_descriptor import DirectoryFd
    from pipegrid.tree.metadata_restore import ExtendedRestore
    from pipegrid.tree.tree_download import TreeGetResult
    from pipegrid.tree.tree_grid import Grid


# ``get -r``: fetches a directory on the grid into a local one.

MAX_NOTED = 20
"""How many files whose mode or time could not be set are named; all of them are counted."""


class TreeOptions(NamedTuple):
    """The options for fetching a tree; see ``Grid.tree.get_tree``."""

    force: bool = False
    paranoid: bool = False
    modes: Modes = "umask"
    max_paths: int | None = None
    extended: ExtendedRestore | None = None
    wants: Callable[[tuple[str, ...], bool], bool] | None = None


def tree_job(
    named: CapArguments, output: str | None, byte_range: str | None, options: TreeOptions
) -> GridJob:
    """
    Return the job that fetches one tree.

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
    Fetch a tree, and report the outcome.

    Args:
        metadata_json, into: see ``Grid.tree.get_tree``.

    Returns:
        0 if all entries were fetched; the failures' status if all have the same; otherwise 1.
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
            console.note(f"{cap_lookup.shown_path(path)}: {why}")

    def not_restored(path: tuple[str, ...], kind: str, why: str) -> None:
        why = with_options(why, _RIGHTS)
        console.detail(f"{cap_lookup.shown_path(path)}: {kind} not restored: {why}")

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
            not_restored=not_restored,
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
        "not_restored": result.not_restored.counts(),
    }
    report_losses(console, result.not_restored, "restored")
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
        console.note(f"{fetched}, in {directories}{left_out}")


def report_losses(console: Console, losses: MetadataLosses, done: str) -> None:
    """
    Report the extended metadata that was not stored or restored, one line for each kind of it.

    Args:
        done: ``stored`` or ``restored``.
    """
    report = console.fault if done == "stored" else console.note
    for text in losses.sentences(done):
        report(with_options(text, _RIGHTS))


_RIGHTS = ("need may_give_rights",)


# Storing whole directories: the code that ``put -r`` and ``backup`` share.

MAX_LIST_BYTES = 64 << 20
MAX_UNMATCHED = 20
"""How many of the patterns that matched nothing are named."""


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
        "--files-from0",
        type=click.Path(allow_dash=True, readable=False),
        metavar="FILE",
        help="The same for paths that each end in a zero byte, as 'find -print0' prints them.",
    ),
    click.option(
        "--files-from",
        type=click.Path(allow_dash=True, readable=False),
        metavar="FILE",
        help="Store only what FILE lists, one path per line, below the directory or absolute; "
        "'-' is standard input.",
    ),
    click.option(
        "--exclude-larger-than",
        type=byte_size,
        metavar="SIZE",
        help="Leave out files of more than SIZE, such as 500MB.",
    ),
    click.option(
        "--exclude-if-present",
        multiple=True,
        metavar="NAME[:HEADER]",
        help="The same for directories with a file NAME, which begins with HEADER.",
    ),
    click.option(
        "--exclude-caches",
        is_flag=True,
        help="Of a directory with a CACHEDIR.TAG and its signature, store only itself and that file.",
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
        help="Leave out what the patterns in FILE match, one per line, as in a .gitignore file.",
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="PATTERN",
        help="Leave out what matches, as in a .gitignore file: names anywhere ('*.tmp'), or with a slash "
        "paths below the directory ('build/*.o', '/cache'). A slash at the end means directories only, '!' "
        "in front that it is stored. The last pattern that matches decides; those in files come first.",
    ),
)
"""The options that select which files of a directory are stored; ``SelectionOptions`` takes their values."""


class SelectionOptions:
    """
    The values of ``selection_options``.

    Attributes:
        one_file_system: whether to store mounted directories as empty ones.
        strict: whether skipped pipes, sockets and devices change the exit status.

    Raises:
        UsageError: a pattern is invalid, or two lists come from standard input.
        SourceError: a file of patterns or paths cannot be read.
    """

    def __init__(self, **given: Any) -> None:
        self.one_file_system: bool = given["one_file_system"]
        self.strict: bool = given["strict"]
        self._given_in = dict.fromkeys(given["exclude"], "--exclude")
        for pattern in self._given_in:
            if not pattern.removeprefix("!").strip("/"):
                raise usage_error(
                    f"--exclude: '{printable(pattern)}' can match nothing; give a pattern"
                )
        self._patterns = list(file_selection.VCS) if given["exclude_vcs"] else []
        for path in given["exclude_from"]:
            text = _text_of(path)
            for number, line in ignore_patterns.patterns_of(os.fsencode(text)):
                pattern = os.fsdecode(line)
                self._given_in.setdefault(pattern, f"{printable(path)}:{number}")
                self._patterns.append(pattern)
        self._patterns += given["exclude"]
        self._unmatched = set(self._given_in)
        self._made: list[file_selection.TreeSelection] = []
        tags = [file_selection.directory_tag(each) for each in given["exclude_if_present"]]
        if given["exclude_caches"]:
            tags.append(file_selection.CACHES)
        self._more: dict[str, Any] = {"tags": tags, "max_file_bytes": given["exclude_larger_than"]}
        self._lines = _listed(given["files_from"], given["files_from0"])
        if self._patterns:
            file_selection.TreeSelection(self._patterns)  # raises errors of invalid patterns

    @property
    def is_any(self) -> bool:
        """Whether any option excludes something in a directory from being stored."""
        more = self._more["tags"] or self._more["max_file_bytes"] is not None
        return bool(self._patterns or more or self._lines is not None or self.one_file_system)

    def of(self, *directories: str) -> Callable[[str], file_selection.TreeSelection]:
        """
        Return a function that is called with one of the directories and returns the selection for one walk
        through that directory.

        Raises:
            UsageError: a path in a list is not below any of the directories, or is relative and there are
                several directories.
        """
        only: dict[str, list[str]] = {}
        if self._lines is not None and directories:
            roots = [os.path.abspath(each) for each in directories]
            only = file_selection.paths_below_each(roots, self._lines)
            for listed in only.values():
                file_selection.TreeSelection(self._patterns, listed)

        def make(directory: str) -> file_selection.TreeSelection:
            self._note_unmatched()
            listed = None if self._lines is None else only[os.path.abspath(directory)]
            made = file_selection.TreeSelection(self._patterns, listed, **self._more)
            self._made.append(made)
            return made

        return make

    def _note_unmatched(self) -> None:
        for made in self._made:
            self._unmatched.intersection_update(made.unmatched)
        self._made.clear()

    def status_of(self, counts: tree_upload.TreeCounts) -> ExitStatus:
        """Return the exit status for a stored tree: 1 if files were left out or, with ``strict``, skipped."""
        failed = counts.left_out or (self.strict and counts.skipped)
        return ExitStatus.FAILED if failed else ExitStatus.DONE

    def report_unmatched(self, console: Console) -> None:
        """Report the patterns that matched nothing in any walk."""
        self._note_unmatched()
        unmatched = [each for each in self._given_in if each in self._unmatched]
        for pattern in unmatched[:MAX_UNMATCHED]:
            where = self._given_in[pattern]
            console.note(
                f"{where}: the pattern '{printable(pattern)}' matched nothing{_hint(pattern)}"
            )
        if len(unmatched) > MAX_UNMATCHED:
            more = len(unmatched) - MAX_UNMATCHED
            console.note(f"{more} more patterns matched nothing")


def _hint(pattern: str) -> str:
    """Return a hint why a pattern probably matched nothing, or ""."""
    if pattern.removeprefix("!").startswith("./"):
        return "; a path from the directory down begins with '/', without the dot"
    if pattern.startswith("!"):
        return "; nothing in a directory that is left out can be included again"
    return ""


def _listed(path: str | None, path0: str | None) -> list[str] | None:
    """Return the paths of ``--files-from`` and ``--files-from0``; None if neither is given."""
    if path is None and path0 is None:
        return None
    if path == path0 == "-":
        raise usage_error("standard input can be read only once: --files-from or --files-from0")
    found = [] if path is None else _text_of(path).split("\n")
    if path0 is not None:
        data = _content_of(path0)
        if data and not data.endswith(b"\0"):
            raise usage_error(
                f"--files-from0: {printable(path0)} does not end in a zero byte, so its last path may be "
                "incomplete; --files-from takes one path per line"
            )
        found += os.fsdecode(data).split("\0")
    return found


def _text_of(path: str) -> str:
    return decode_text(_content_of(path), "standard input" if path == "-" else printable(path))


def _content_of(path: str) -> bytes:
    if path == "":
        raise usage_error(f"FILE: {EMPTY_NAME}")
    try:
        stdin = None if sys.stdin is None else sys.stdin.buffer
        data = read_given(path, stdin, MAX_LIST_BYTES + 1)
    except OSError as error:
        raise unreadable(printable(path), error) from error
    if len(data) > MAX_LIST_BYTES:
        raise SourceError(
            f"{printable(path)} has more than {MAX_LIST_BYTES >> 20} MiB; list directories instead"
        )
    return data


def reports_of(
    console: Console, progress: Any, losses: MetadataLosses | None = None
) -> tree_upload.TreeReports:
    """
    Return the functions with which an upload reports each left-out file on a line, and moves the progress
    bar.

    Args:
        losses: counts the extended metadata that is not stored.
    """

    def left_out(path: str, why: str) -> None:
        why = with_options(why, ("less with happy",))
        console.fault(f"{printable(path)}: left out: {printable(why)}")
        console.json_result({"path": path, "error": why, "exit_status": int(ExitStatus.FAILED)})

    def skipped(path: str, what: str) -> None:
        console.detail(f"{printable(path)}: skipped: it is {what}")
        console.json_result({"path": path, "skipped": what})

    waiting = progress_bar.waiting_of(console, progress)

    def not_stored(path: str, kind: str, why: str) -> None:
        console.detail(f"{printable(path)}: {kind} not stored: {why}")
        if losses is not None:
            losses.add(printable(path), kind, why)

    if not progress.is_wanted:
        return tree_upload.TreeReports(
            left_out, waiting=waiting, skipped=skipped, not_stored=not_stored
        )
    bar = progress.upload(None)
    sending_bytes = 0

    def moved(counts: tree_upload.TreeCounts) -> None:
        unchanged = counts.unchanged_bytes
        bar.found(unchanged, counts.bytes)
        bar.sent(min(unchanged + counts.sent_bytes + sending_bytes, counts.bytes), counts.bytes)

    def sending(counts: tree_upload.TreeCounts, more: int) -> None:
        nonlocal sending_bytes
        sending_bytes += more
        if more > 0:  # each decrease is followed at once by a call of ``moved``
            moved(counts)

    return tree_upload.TreeReports(left_out, moved, sending, waiting, skipped, not_stored)


def counts_of(counts: tree_upload.TreeCounts) -> str:
    """Return a sentence with the numbers of files that were found, sent and left out."""
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
    if counts.excluded:
        left_out += f"; excluded {counted(counts.excluded, 'entry', 'entries')}"
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


def fields_of(counts: tree_upload.TreeCounts) -> dict[str, int]:
    """Return the numbers of ``counts_of`` in the JSON form that the docs describe."""
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
    """Store directories, one after the other, and print their caps; return the exit status."""
    statuses: set[ExitStatus] = set()
    all_met = True
    for directory in directories:
        try:
            selection = chosen.of(directory)(directory)
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
        console.note(f"{printable(directory)}: {counts_of(result.counts)}")
        statuses.add(chosen.status_of(result.counts))
        fields = {
            "path": directory,
            "cap": cap,
            **fields_of(result.counts),
            "elapsed_s": result.elapsed_s,
        }
        text = cap_list_files.as_line(cap, directory) if with_names else cap
        keep_in = grid.config.directory if options.get("random_key") else None
        cap_list_files.print_cap(console, keep_in, text, fields, cap, directory)
    if all_met:
        chosen.report_unmatched(console)
    return one_status(statuses)
