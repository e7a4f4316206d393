"""The work of ``put``: stores many files at once, or one file at a path on the grid or as a mutable file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from twisted.python.failure import Failure

from pipegrid.cli import cap_lookup, destination_child
from pipegrid.cli.cap_list_files import as_line, keep_caps, print_cap
from pipegrid.cli.console import Console, source_of
from pipegrid.cli.error_report import ExitStatus, UnprintedCap, one_status
from pipegrid.cli.progress_bar import ProgressBar
from pipegrid.core import caps
from pipegrid.core.caps import Cap, MutableCap, UnknownCap
from pipegrid.core.text import counted, printable
from pipegrid.errors import CapError, SourceError, UsageError
from pipegrid.transfer.put.source import size_of
from pipegrid.tree import file_metadata

if TYPE_CHECKING:
    from pathlib import Path

    from pipegrid.grid import Grid as FileGrid
    from pipegrid.transfer.results import PutResult
    from pipegrid.tree.tree_grid import Grid


# The files of one ``put``: stored many at once, with their caps printed in the given order.
#
# ``Grid.put_many`` decides which files are stored at the same time.


class Uploads:
    """
    Stores the files of one ``put``, and prints their caps.

    Args:
        files: the paths of the files; ``-`` is standard input.
        options: further arguments of ``Grid.put_many``.
        with_names: whether to print lines with names, as in a cap file, instead of caps alone.
    """

    def __init__(
        self,
        grid: FileGrid,
        console: Console,
        files: Sequence[str],
        options: dict[str, Any],
        with_names: bool = False,
    ) -> None:
        self._grid = grid
        self._console = console
        self._files = files
        self._options = options
        self._with_names = with_names
        self._outcomes: dict[int, PutResult | Failure] = {}
        self._printed = 0
        self._statuses: set[ExitStatus] = set()

    async def run(self) -> int:
        """
        Store all files and print all caps.

        Returns:
            0 if all succeeded; the failures' status if all have the same; otherwise 1.
        """
        try:
            sources = [source_of(path, self._console.stdin) for path in self._files]
            with ProgressBar(self._console, "put") as progress:
                calls = progress_calls(progress, sources)
                await self._grid.put_many(sources, **calls, ended=self._ended, **self._options)
        except UnprintedCap as error:
            self._keep_the_rest(error)
            raise
        return one_status(self._statuses)

    def _keep_the_rest(self, error: UnprintedCap) -> None:
        """Save the caps of stored files that follow a file whose cap could not be printed."""
        lines = [
            as_line(str(each.cap), self._files[number])
            for number, each in sorted(self._outcomes.items())
            if not isinstance(each, Failure)
        ]
        if lines and isinstance(error.__cause__, Exception):
            kept = keep_caps(self._grid.config.directory, lines, error.__cause__)
            self._console.complain(kept)

    def _ended(self, number: int, outcome: PutResult | Failure) -> None:
        self._outcomes[number] = outcome
        while self._printed in self._outcomes:
            path, outcome = self._files[self._printed], self._outcomes.pop(self._printed)
            self._printed += 1
            if isinstance(outcome, Failure):
                self._report_failure(path, outcome)
            else:
                self._report_success(path, outcome)

    def _report_failure(self, path: str, failure: Failure) -> None:
        error = failure.value
        assert error is not None
        if isinstance(error, SourceError) and os.path.isdir(path):
            error = SourceError(
                f"'{printable(path)}' is a directory; add -r to store all that is in it"
            )
        self._statuses.add(self._console.failed(error, _name(path), {"path": path}))

    def _report_success(self, path: str, result: PutResult) -> None:
        console = self._console
        console.detail(
            f"{_name(path)}: {counted(result.size, 'byte')}, "
            f"{counted(len(result.shares_placed), 'share')} placed, "
            f"{len(result.shares_found)} found, happiness {result.happiness}, "
            f"{result.elapsed_s:.3f} s"
        )
        cap = str(result.cap)
        text = as_line(cap, path) if self._with_names else cap
        fields = {
            "path": path,
            "cap": cap,
            "size": result.size,
            "share_bytes": result.share_bytes,
            "shares_placed": result.shares_placed,
            "shares_found": result.shares_found,
            "happiness": result.happiness,
            "elapsed_s": result.elapsed_s,
        }
        # A cap made without a random key is not saved, since the same command makes it again.
        keep_in = self._grid.config.directory if self._options.get("random_key") else None
        print_cap(console, keep_in, text, fields, cap, path)


def progress_calls(progress: ProgressBar, sources: Sequence[Any]) -> dict[str, Any]:
    """
    Return the arguments of ``Grid.put_many`` with which its files report their progress; none without a bar.
    """
    if not progress.is_wanted:
        return {}
    parts = [progress.upload(size_of(source)) for source in sources]
    return {
        "progress": lambda number, done, total: parts[number].sent(done, total),
        "found": lambda number, done, total: parts[number].found(done, total),
        "hashing": lambda number, done, total: parts[number].hashed(done, total),
    }


def _name(path: str) -> str:
    return "standard input" if path == "-" else printable(path)


# ``put`` to a path on the grid: mutable files, and entries of mutable directories.


def destination_of(files: Sequence[str]) -> str | None:
    """
    Return the last argument of ``put`` if it is a path on the grid, or None if all arguments are files.

    See ``destination_child.is_on_grid``.

    Raises:
        UsageError: the aliases cannot be read.
    """
    last = files[-1]
    if len(files) < 2:
        return None

    return last.strip() if last.strip() != "-" and destination_child.is_on_grid(last) else None


class PutTarget(NamedTuple):
    """
    Where one file is stored, and how.

    Attributes:
        path: the path on the grid, or the write cap of a mutable file; None: the file is linked nowhere, and
            only its cap is printed.
        format: the format of a new mutable file; None for an immutable file.
        force: whether to replace an existing object.
        read_only: whether to print the read cap instead of the write cap.
    """

    path: str | None
    format: str | None
    force: bool
    read_only: bool


async def put_at(
    grid: Grid, console: Console, file: str, place: PutTarget, options: dict[str, Any]
) -> None:
    """
    Store one file and print its cap.

    Args:
        options: further arguments of ``Grid.put``.

    Raises:
        ChildExists: an object has the name in ``place`` and must not be replaced.
        PipegridError: an operation on the grid failed, or the file cannot be read.
    """
    path, format, force, read_only = place
    keeps = format is not None or options["random_key"]  # then the printed cap is its only copy
    show = partial(_show, console, grid.config.directory if keeps else None, file)
    if file != "-" and os.path.isdir(file):
        raise SourceError(
            f"'{printable(file)}' is a directory; 'pipegrid cp -r' copies all that is in it"
        )
    source = source_of(file, console.stdin)
    if path is None:
        show(await _store(grid, source, format, options), read_only)
        return
    root, names = await cap_lookup.root_of(grid, path)
    if not names and isinstance(cap := caps.parse_cap(root), MutableCap):
        if cap.access != "write":
            raise CapError("this cap does not write the file; use its write cap")
        await grid.overwrite(cap, source)
        show(cap, read_only)
        return
    spot = await destination_child.spot_at(grid, path, _name_of(file), make=True)
    spot.check_kind()
    if (there := _overwritten(spot, format, force)) is not None:
        await grid.overwrite(there, source)
        show(there, read_only)
        return
    spot.check_free(force)
    left: list[Cap] = []
    try:
        await _put_into(spot, source, place, options, left.append)
    except BaseException:
        if left:
            show(left[0], False)  # otherwise the cap would be lost
        raise
    show(left[0], read_only)


def _show(console: Console, keep_in: Path | None, file: str, cap: Cap, read_only: bool) -> None:
    """
    Print a cap; if that fails, save it in ``keep_in``, the client's directory, or nowhere if that is None.
    """
    given = cap.readonly() if read_only and not isinstance(cap, UnknownCap) else cap
    text = str(given)
    print_cap(console, keep_in, text, {"path": file, "cap": text}, str(cap), file)


def _name_of(file: str) -> str | None:
    """Return the name that a local file gets in a directory on the grid, as with ``put -r`` and ``cp``."""
    return None if file == "-" else file_metadata.entry_name(os.fsencode(os.path.basename(file)))[0]


async def _put_into(
    spot: destination_child.GridDestination,
    source: Any,
    place: PutTarget,
    options: dict[str, Any],
    stored: Callable[[Cap], None],
) -> None:
    """
    Create missing directories, store a new file and link it; ``stored`` is called with its cap before
    linking.
    """
    if spot.missing and isinstance(source, str) and not os.path.exists(source):
        raise SourceError(f"there is no local file {printable(source)}; check the path")
    directory = await spot.reach()
    put: Callable[..., Any] = directory.put
    if place.format is not None:
        put, options = directory.put_mutable, {"format": place.format, "params": options["params"]}
    await put(spot.name, source, metadata={}, replace=place.force, stored=stored, **options)


def _overwritten(
    spot: destination_child.GridDestination, format: str | None, force: bool
) -> MutableCap | None:
    """
    Return the write cap of the mutable file to overwrite in place, or None to store a new file.

    Without ``format``, an existing mutable file is overwritten even if ``force`` is given: other programs
    with its cap must see the new content, and this entry may have the only copy of the cap.

    Args:
        format: the format of a new mutable file, which replaces an existing one only with ``force``.

    Raises:
        UsageError: a mutable file exists, and ``format`` is given without ``force``.
    """
    there = None if spot.there is None else spot.there.write_cap
    if not isinstance(there, MutableCap) or (force and format is not None):
        return None
    if format is not None:
        raise UsageError(
            "a mutable file of this name exists already; leave out --mutable to overwrite it, or add -f to "
            "replace it with a new one"
        )
    return there


async def _store(grid: Grid, source: Any, format: str | None, options: dict[str, Any]) -> Cap:
    if format is None:
        return (await grid.put(source, **options)).cap
    return (await grid.create_mutable(source, format=format, params=options["params"])).cap
