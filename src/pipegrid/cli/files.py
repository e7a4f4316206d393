"""The files that a command line names by their caps, on itself or in cap files."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import attrs
import click

from pipegrid.cli.capfile import CapLine, read_cap_file
from pipegrid.cli.console import Console
from pipegrid.cli.job import Invocation
from pipegrid.cli.meant import caps_in_file
from pipegrid.cli.outcome import ExitStatus, one_status
from pipegrid.core import base32
from pipegrid.core.caps import (
    Cap,
    ChkCap,
    ChkVerifierCap,
    DirectoryCap,
    LitCap,
    MutableCap,
    parse_cap,
)
from pipegrid.core.text import CAP_STARTS, as_pasted, printable
from pipegrid.errors import CapError, PipegridError, UsageError, naming
from pipegrid.reactor.deferreds import few_at_a_time

C = TypeVar("C", bound=Cap)
R = TypeVar("R")


@attrs.frozen
class NamedFile(Generic[C]):
    """
    One file that the user means.

    Attributes:
        text: its cap as given.
        cap: the same, understood.
        name: as the cap file has it, or the last of its path; or None.
        names: the path below the cap, if that is a directory's: then ``cap`` is of no use until
            ``trees.Locator`` has found what is there.
        root: the cap that the path begins with.
        where: it was given, if it is one of several.
        problem: why it names no file; then ``cap`` is of no use, and ``trees.Locator`` raises this.
        place: the path as given, if it begins with an alias, and so gives nothing away.
    """

    text: str
    cap: C
    name: str | None = None
    names: tuple[str, ...] = ()
    root: str = attrs.field(default="", repr=False)
    where: str = ""
    problem: UsageError | None = None
    place: str = ""

    @property
    def label(self) -> str:
        """
        What people call it: its path or its name, or what servers call it, which gives nothing away.
        """
        if self.problem is not None:
            return self.where
        if self.place:
            return printable(self.place)
        return self.base_name if self.name is None else printable(self.name)

    @property
    def start(self) -> str:
        """What its path begins with, as given: all of it where it is a cap alone."""
        return self.root or self.text

    @property
    def base_name(self) -> str:
        """What it is called if nobody says otherwise."""
        return storage_index_text(self.cap) or f"literal-{_digest(self.cap)}"


def identity(file: NamedFile[Any]) -> dict[str, Any]:
    """Return the JSON fields that say which file it is."""
    return {"cap": file.text} if file.name is None else {"cap": file.text, "name": file.name}


def storage_index_text(cap: Cap) -> str:
    """Return the storage index as servers spell it; nothing if the cap holds the file."""
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
    Return the files that caps on the command line and cap files name, each once.

    One of several that is no cap, or of the wrong kind, is returned with its ``problem``.

    Args:
        caps: ``-`` among them stands for those on standard input.
        understand: returns a cap, or raises CapError.

    Raises:
        CapError: none of them is a cap of the right kind.
        SourceError: a cap file cannot be read.
        UsageError: there is none at all.
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
        console.say(f"pipegrid: {again} of {len(lines)} caps were given before; each counts once")
    return list(found.values())


def _understood(line: CapLine, understand: Callable[[str], C]) -> NamedFile[C]:
    text, name, where = line
    try:
        return _named_file(text, name, understand)
    except UsageError as error:
        told = type(error)(f"{where}: {error}" if where else str(error))
        problem = naming(told, *error.parameters)
        return NamedFile(text, cast(C, LitCap(b"")), name, where=where or text, problem=problem)


def _named_file(text: str, name: str | None, understand: Callable[[str], C]) -> NamedFile[C]:
    text = as_pasted(text)
    place = ""
    if "/" in text or not text.startswith("URI:"):
        from pipegrid.tree.grid_paths import has_path, names_alias, parse

        if has_path(text):
            if names_alias(text):
                root, names = parse(text, aliases_here())
                place = text if name is None else ""
            else:
                root, names = parse(text, None)
            cap = parse_cap(root)
            if names and isinstance(cap, DirectoryCap):
                # Nobody knows yet what is there; an empty file stands for it.
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
    Check a file for a command that has no grid to ask what a path leads to.

    Raises:
        CapError: it is named by a path, or has a problem.
    """
    check_all((file,))
    if file.names:
        raise CapError(
            "what a path leads to is known to the grid only; give its cap, which 'pipegrid manifest' lists"
        )


def check_all(files: Sequence[NamedFile[Any]]) -> None:
    """
    Raises:
        UsageError: one of the files has a problem.
    """
    for file in files:
        if file.problem is not None:
            raise file.problem


def starts_of(files: Sequence[NamedFile[Any]]) -> list[str]:
    """Return what the paths begin with that ``GridJob`` looks at before it opens a grid."""
    return [file.start for file in files if file.problem is None]


def aliases_here() -> dict[str, str]:
    """
    Return the aliases of the client's directory that the command line means.

    Raises:
        UsageError: they cannot be read.
    """
    from pipegrid.tree.aliases import read_aliases

    return read_aliases(client_directory())


def begins_with_alias(text: str) -> bool:
    """
    Return whether text begins with an alias of this directory, and a colon behind it.

    Raises:
        UsageError: the aliases cannot be read.
    """
    from pipegrid.tree.aliases import as_written

    alias, found, _ = text.partition(":")
    return bool(found) and as_written(alias, aliases_here()) is not None


def client_directory() -> Path:
    """Return the client's directory that the command line means; it may not be there."""
    from pipegrid.grid.client_paths import default_directory

    context = click.get_current_context(silent=True)
    invocation = None if context is None else context.find_object(Invocation)
    named = None if invocation is None else invocation.directory
    return default_directory() if named is None else Path(named)


async def each_in_order(
    console: Console,
    files: Sequence[NamedFile[C]],
    at_once: int,
    work: Callable[[NamedFile[C]], Awaitable[R]],
    show: Callable[[NamedFile[C], R], ExitStatus],
    fields: Callable[[NamedFile[C]], dict[str, Any]] = identity,
) -> ExitStatus:
    """
    Do something with each file, a few at once, and show what came of it in their order.

    With one file its failure is raised. With several, one that fails does not stop the others.

    Args:
        at_once: how many files.
        fields: say in JSON which file failed.

    Returns:
        0; or the status of those that are not well if they share one; or 1.
    """
    if len(files) == 1:
        return show(files[0], await work(files[0]))
    outcomes: dict[int, R | Exception] = {}
    statuses: list[ExitStatus] = []

    async def step(number: int) -> None:
        try:
            outcomes[number] = await work(files[number])
        except Exception as error:
            if _is_the_end(error):
                raise
            outcomes[number] = error
        while len(statuses) in outcomes:
            file, outcome = files[len(statuses)], outcomes.pop(len(statuses))
            if isinstance(outcome, Exception):
                statuses.append(console.failed(outcome, file.label, fields(file), True))
            else:
                statuses.append(show(file, outcome))

    numbers = iter(range(len(files)))

    async def steps() -> None:
        for number in numbers:  # which all share, so that nothing is held for what is yet to come
            await step(number)

    await few_at_a_time(at_once, [steps] * at_once)
    return one_status(statuses)


async def each_argument(
    console: Console, texts: Sequence[str], work: Callable[[str], Awaitable[ExitStatus | None]]
) -> ExitStatus:
    """
    Do something with each path on a command line, one after the other.

    With one its failure is raised. With several, one that fails does not stop the others.

    Args:
        work: returns a status, or None for 0.

    Returns:
        0; or the status of those that are not well if they share one; or 1.
    """
    if len(texts) == 1:
        return await work(texts[0]) or ExitStatus.DONE
    statuses: set[ExitStatus] = set()
    for number, text in enumerate(texts, 1):
        label = argument_label(text, number)
        try:
            statuses.add(await work(text) or ExitStatus.DONE)
        except PipegridError as error:
            statuses.add(console.failed(error, label, {"argument": label}, True))
    return one_status(statuses)


def argument_label(text: str, number: int) -> str:
    """Return what people call an argument; a cap, which grants something, is shown as its number."""
    text = as_pasted(text)
    if not text.startswith(CAP_STARTS):
        return printable(text)
    _, slash, rest = text.partition("/")
    return printable(f"cap number {number}{slash}{rest}")


def _is_the_end(error: Exception) -> bool:
    """Whether the command was cancelled, or nobody reads its results any more."""
    from twisted.internet.defer import CancelledError

    return isinstance(error, (CancelledError, BrokenPipeError))
