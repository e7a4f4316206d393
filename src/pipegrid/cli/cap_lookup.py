"""Finds the files that caps, paths and aliases on a command line or in a cap file name."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import attrs
import click

from pipegrid.cli import cap_list_files
from pipegrid.cli.cap_list_files import CapLine, caps_in_file, read_cap_file
from pipegrid.cli.command_job import Invocation
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, one_status
from pipegrid.core import base32
from pipegrid.core.caps import (
    Cap,
    ChkCap,
    ChkVerifierCap,
    DirectoryCap,
    LitCap,
    MutableCap,
    UnknownCap,
    parse_cap,
    unknown_kind,
)
from pipegrid.core.text import CAP_STARTS, as_pasted, printable
from pipegrid.errors import CapError, PipegridError, UsageError, naming
from pipegrid.grid import client_paths
from pipegrid.reactor import deferreds
from pipegrid.tree import aliases, grid_paths, walk
from pipegrid.tree.backup import run_paths

if TYPE_CHECKING:
    from pipegrid.grid.file_grid import Grid
    from pipegrid.tree.grid_paths import PathEnd
    from pipegrid.tree.tree_grid import Grid as TreeGrid


# The files that a command line names by their caps, directly or in cap files.

C = TypeVar("C", bound=Cap)
R = TypeVar("R")


@attrs.frozen
class NamedFile(Generic[C]):
    """
    One file that the user has named.

    Attributes:
        text: the cap or path as given.
        cap: the parsed cap.
        name: the name in the cap file, or the last part of the path, or None.
        names: the path below the cap of a directory; if not empty, ``Locator`` must replace ``cap``.
        root: the cap that the path begins with, or the whole path into a run; "": there is no path to follow.
        where: the position of the cap for errors, if several were given.
        problem: why the text names no file; if not None, ``cap`` is a placeholder, and ``Locator`` raises
            this.
        place: the path as given, if it begins with an alias or a run, so that it contains no secret; else "".
        in_run: whether ``root`` is a path into a run of a backup.
    """

    text: str
    cap: C
    name: str | None = None
    names: tuple[str, ...] = ()
    root: str = attrs.field(default="", repr=False)
    where: str = ""
    problem: UsageError | None = None
    place: str = ""
    in_run: bool = False

    @property
    def label(self) -> str:
        """The file's name for messages: its path, its name, or its storage index, none of them secret."""
        if self.problem is not None:
            return self.where
        if self.place:
            return printable(self.place)
        return self.base_name if self.name is None else printable(self.name)

    @property
    def base_name(self) -> str:
        return storage_index_text(self.cap) or f"literal-{_digest(self.cap)}"


def identity(file: NamedFile[Any]) -> dict[str, Any]:
    """Return the JSON fields that identify a file."""
    return {"cap": file.text} if file.name is None else {"cap": file.text, "name": file.name}


def storage_index_text(cap: Cap) -> str:
    """Return the storage index in base32, as servers write it; "" if the cap contains the file."""
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    return (
        base32.encode(file.storage_index)
        if isinstance(file, ChkCap | ChkVerifierCap | MutableCap)
        else ""
    )


def _digest(cap: Cap) -> str:
    return base32.encode(hashlib.sha256(str(cap).encode()).digest()[:10])


def named_files(
    console: Console,
    caps: Sequence[str],
    cap_files: Sequence[str],
    understand: Callable[[str], C],
) -> list[NamedFile[C]]:
    """
    Return the files that caps on the command line and in cap files name, each once.

    If there are several caps, one that is invalid or of the wrong kind is returned as a file with a
    ``problem``.

    Args:
        caps: the caps on the command line; ``-`` reads caps from standard input.
        understand: parses a cap, or raises CapError.

    Raises:
        CapError: none of the texts is a cap of the right kind.
        SourceError: a cap file cannot be read.
        UsageError: a cap file contains no caps, or standard input is named twice.
    """
    from_stdin = [path for path in (*caps, *cap_files) if path.strip() == "-"]
    caps = [text for text in caps if text.strip() != "-"]
    several = len(caps) > 1
    lines = [
        CapLine(text, None, f"cap number {number}" if several else "")
        for number, text in enumerate(caps, 1)
    ]
    if len(from_stdin) > 1:
        raise UsageError("standard input can be read only once")
    for path in (*(path for path in cap_files if path != "-"), *from_stdin):
        lines += read_cap_file(path, console.stdin)
    found: dict[Any, NamedFile[C]] = {}
    for line in lines:
        file = _understood(line, understand)
        found.setdefault((file.root or file.cap, file.names, file.name, file.where), file)
    problems = [file.problem for file in found.values() if file.problem is not None]
    if len(problems) == len(found):
        raise problems[0]
    if again := len(lines) - len(found):
        console.note(f"{again} of {len(lines)} caps were given before; each counts once")
    return list(found.values())


def _understood(line: CapLine, understand: Callable[[str], C]) -> NamedFile[C]:
    text, name, where = line
    try:
        return _named_file(text, name, understand)
    except UsageError as error:
        located = type(error)(f"{where}: {error}" if where else str(error))
        problem = naming(located, *error.parameters)
        return NamedFile(text, cast(C, LitCap(b"")), name, where=where or text, problem=problem)


def _named_file(text: str, name: str | None, understand: Callable[[str], C]) -> NamedFile[C]:
    text = as_pasted(text)
    place = ""
    run = run_paths.run_path_here(text, client_directory()) if "@" in text else None
    if run is not None:
        called = name or (run.names[-1] if run.names else None)
        empty, place = cast(C, LitCap(b"")), text if name is None else ""
        return NamedFile(text, empty, called, run.names, text, place=place, in_run=True)
    if ("/" in text or not text.startswith("URI:")) and grid_paths.has_path(text):
        by_alias = grid_paths.names_alias(text)
        known = aliases.read_aliases(client_directory()) if by_alias else None
        root, names = grid_paths.parse(text, known)
        place = text if by_alias and name is None else ""
        cap = parse_cap(root)
        if names and isinstance(cap, DirectoryCap):
            # The cap at the path is not known yet; an empty file is the placeholder.
            return NamedFile(
                text, cast(C, LitCap(b"")), name or names[-1], names, root, place=place
            )
        if names:
            raise CapError(
                "the cap before the path is not that of a directory; leave the path out, or give the "
                "cap of the directory"
            )
        text = root
    try:
        return NamedFile(text.strip(), understand(text), name, place=place)
    except CapError:
        if hint := caps_in_file(text, by_option=True):
            raise CapError(hint) from None
        meant = text.strip().partition("/")[0] + ":"
        if ":" in text or not begins_with_alias(meant):
            raise
        shown = printable(meant)
        raise CapError(
            f"'{shown[:-1]}' is neither a cap nor an alias; did you mean '{shown}'?"
        ) from None


def check_path(file: NamedFile[Any]) -> None:
    """
    Check a file for a command without a grid, which cannot follow paths.

    Raises:
        CapError: the file was named by a path, or has a problem.
    """
    if file.problem is not None:
        raise file.problem
    if file.root:
        raise CapError(
            "only the grid knows what a path leads to; give its cap, which 'pipegrid manifest' lists"
        )


def starts_of(files: Sequence[NamedFile[Any]]) -> list[str]:
    """Return the paths for a ``GridJob`` that uses these files: the cap, or the path into a run, of each."""
    return [file.root or file.text for file in files if file.problem is None]


def begins_with_alias(text: str) -> bool:
    """
    Return whether a text begins with an alias of the client's directory and a colon.

    Raises:
        UsageError: the aliases cannot be read.
    """
    alias, found, _ = text.partition(":")
    if not found:
        return False
    return aliases.as_written(alias, aliases.read_aliases(client_directory())) is not None


def client_directory() -> Path:
    """Return the client's directory, which need not exist."""
    context = click.get_current_context(silent=True)
    invocation = None if context is None else context.find_object(Invocation)
    return client_paths.default_directory() if invocation is None else invocation.grid_directory


async def each_in_order(
    console: Console,
    files: Sequence[NamedFile[C]],
    at_once: int,
    work: Callable[[NamedFile[C]], Awaitable[R]],
    show: Callable[[NamedFile[C], R], ExitStatus],
    fields: Callable[[NamedFile[C]], dict[str, Any]] = identity,
) -> ExitStatus:
    """
    Process several files at the same time, and show the outcomes in the order of the files.

    If there is only one file, its failure is raised. Otherwise a failure does not stop the other files.

    Args:
        at_once: how many files to process at the same time.
        fields: returns the JSON fields that identify a failed file.

    Returns:
        0 if all succeeded; the status of the failed files if all have the same; otherwise 1.
    """
    from twisted.internet.defer import CancelledError

    if len(files) == 1:
        return show(files[0], await work(files[0]))
    outcomes: dict[int, R | Exception] = {}
    statuses: list[ExitStatus] = []

    async def step(number: int) -> None:
        try:
            outcomes[number] = await work(files[number])
        except (CancelledError, BrokenPipeError):  # no outcome can be shown any more
            raise
        except Exception as error:
            outcomes[number] = error
        while len(statuses) in outcomes:
            file, outcome = files[len(statuses)], outcomes.pop(len(statuses))
            if isinstance(outcome, Exception):
                statuses.append(console.failed(outcome, file.label, fields(file), True))
            else:
                statuses.append(show(file, outcome))

    numbers = iter(range(len(files)))

    async def steps() -> None:
        # All workers share one iterator, so no list of pending files is kept.
        for number in numbers:
            await step(number)

    await deferreds.few_at_a_time(at_once, [steps] * at_once)
    return one_status(statuses)


async def each_argument(
    grid: TreeGrid,
    console: Console,
    texts: Sequence[str],
    work: Callable[[TreeGrid, Console, str], Awaitable[ExitStatus | None]],
) -> ExitStatus:
    """
    Process the paths on a command line, one after the other.

    If there is only one path, its failure is raised. Otherwise a failure does not stop the other paths.

    Args:
        work: processes a path and returns a status, or None for 0.

    Returns:
        0 if all succeeded; the status of the failed paths if all have the same; otherwise 1.
    """
    if len(texts) == 1:
        return await work(grid, console, texts[0]) or ExitStatus.DONE
    statuses: set[ExitStatus] = set()
    for number, text in enumerate(texts, 1):
        label = argument_label(text, number)
        try:
            statuses.add(await work(grid, console, text) or ExitStatus.DONE)
        except PipegridError as error:
            statuses.add(console.failed(error, label, {"argument": label}, True))
    return one_status(statuses)


def argument_label(text: str, number: int) -> str:
    """
    Return the name of an argument for messages; a cap, which is secret, is replaced by the argument's number.
    """
    text = as_pasted(text)
    if not text.startswith(CAP_STARTS):
        return printable(text)
    _, slash, rest = text.partition("/")
    return printable(f"cap number {number}{slash}{rest}")


# Paths on the command line, and walks whose outcome commands show.
#
# Every argument that takes a cap also takes ``CAP/some/path`` and ``ALIAS:some/path``. ``Locator`` follows
# these paths when the grid is open.

Fetchable = TypeVar("Fetchable", bound=ChkCap | ChkVerifierCap | LitCap | MutableCap)


class Locator:
    """Finds the caps at the ends of many paths, by one ``grid_paths.PathFinder``."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._paths: grid_paths.PathFinder | None = None
        self._runs: run_paths.RunFinder | None = None

    async def located(
        self, file: NamedFile[Any], understand: Callable[[Any], Fetchable]
    ) -> NamedFile[Fetchable]:
        """
        Return the file with the cap at the end of its path; without a path, the file itself.

        Args:
            understand: returns a cap of the wanted kind, or raises CapError.

        Raises:
            NoSuchChild: a name on the path does not exist.
            CapError: the cap is of another kind, or the file has a problem.
            PipegridError: a directory on the path could not be read.
        """
        if file.problem is not None:
            raise file.problem
        if not file.root:
            return file
        root, names = file.root, file.names
        if file.in_run:
            if self._runs is None:
                self._runs = run_paths.RunFinder(self._grid)
            root, names = await self._runs.root_of(file.root)
        if self._paths is None:
            self._paths = grid_paths.PathFinder(self._grid)
        place = await self._paths.resolve(root, names)
        return attrs.evolve(file, cap=understand(_there(place)), names=(), root="", in_run=False)


def _there(place: PathEnd) -> Any:
    cap = place.best or place.cap
    if cap is None:
        raise CapError(
            f"the entry '{printable(place.names[-1])}' holds a write cap only, which the read cap of its "
            "directory does not give; use the write cap of the directory"
        )
    return cap


async def place_of(grid: Grid, text: str) -> PathEnd:
    """Follow a cap or path to its end; raises the errors of ``Locator.located``."""
    root, names = await root_of(grid, text)
    place = await grid_paths.resolve(grid, root, names)
    _there(place)
    return place


async def root_of(grid: Grid, text: str) -> tuple[str, tuple[str, ...]]:
    """
    Parse a path that may begin with an alias of the client's directory or with a run; see
    ``RunFinder.root_of``.

    Raises:
        UsageError: the text is not a path, or its alias, backup or run does not exist.
        PipegridError: the catalogue that lists the run cannot be read.
    """
    try:
        if "@" not in text:  # saves loading the modules that read catalogues
            return grid_paths.parse_here(text, grid.config.directory)
        return await run_paths.RunFinder(grid).root_of(text)
    except UsageError:
        cap_list_files.check_no_file(text)
        raise


async def directory_at(grid: Grid, text: str) -> PathEnd:
    """
    Return the directory at a cap or path.

    Raises:
        CapError: the cap is not that of a directory.
        PipegridError: see ``Locator.located``.
    """
    place = check_known(await place_of(grid, text))
    if not isinstance(place.cap, DirectoryCap):
        raise CapError("this is not the cap of a directory; use 'get' or 'cat' for a file")
    return place


def check_known(place: PathEnd) -> PathEnd:
    """
    Check that the cap at the end of a path grants reading; return the same path end.

    Raises:
        CapError: the cap is a verifier cap, or of an unknown kind.
    """
    if place.kind != "unknown":
        return place
    cap = place.cap
    if isinstance(cap, UnknownCap):
        raise unknown_kind(cap)
    what = "directory" if isinstance(cap, DirectoryCap) else "file"
    raise CapError(
        f"this is the verifier cap of a {what}: it checks its shares, but does not show what is in it; use "
        "its read cap"
    )


def shown_path(path: Sequence[str]) -> str:
    """Return a path for a terminal; ``.`` for the root."""
    return printable("/".join(path)) or "."


async def walk_through(
    grid: TreeGrid, console: Console, place: PathEnd, meet: Callable[[walk.Met], None]
) -> ExitStatus:
    """
    Walk through a directory, and report each unreadable directory, with ``--json`` also as a result; return
    the status.

    Args:
        meet: is called with each object that is found, and with each unreadable directory after its report.
    """
    statuses = set()
    assert place.cap is not None
    with grid.tree.walk(place.cap) as tree:
        async for met in tree:
            if isinstance(met, walk.Unreadable):
                fields, shown = {"path": list(met.path)}, shown_path(met.path)
                statuses.add(console.failed(met.error, shown, fields, cap=str(met.cap)))
            meet(met)
    return one_status(statuses)
