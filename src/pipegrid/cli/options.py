"""Options and argument types that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipegrid.cli.job import Invocation
from pipegrid.errors import UsageError

if TYPE_CHECKING:
    from pipegrid.core.params import Params
    from pipegrid.transfer.settings import UpkeepSettings

F = TypeVar("F", bound=Callable[..., Any])

MIN_MEMORY_BYTES = 8 << 20
"""A few segments of one MiB, coded: less would not get on."""

EMPTY_NAME = "the name is empty; perhaps a variable is not set"

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def byte_size(text: str) -> int:
    """
    Return a number of bytes: ``131072``, ``128KiB``, ``1MiB``; ``K`` is ``KiB``, ``kB`` is 1000.

    Raises:
        click.BadParameter: it is none, or zero.
    """
    match = re.fullmatch(r"\s*([0-9]{1,15})\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise click.BadParameter(f"{text!r} is not a size such as 131072, 128KiB or 1MiB")
    return int(match[1]) * unit


def kept_duration(text: str) -> int:
    """
    Return seconds: ``7 days``, ``12h``, ``30 minutes``.

    Raises:
        click.BadParameter: it is none, or less than a minute.
    """
    from pipegrid.grid.durations import parse_kept

    try:
        return parse_kept(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}") from None


def base32_bytes(text: str) -> bytes:
    """
    Return the bytes that base32 spells, as in ``private/convergence``; the empty text is no bytes.

    Raises:
        click.BadParameter: it is not base32.
    """
    from pipegrid.core import base32

    try:
        return base32.decode(text.strip())
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _noting(note: Callable[[Invocation, Any], None]) -> Callable[..., None]:
    """Return a callback that notes an option, if it was given, where all commands look for it."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        invocation = ctx.find_object(Invocation)
        if value == "":
            raise click.BadParameter(EMPTY_NAME, ctx, param)
        if value and invocation is not None:
            note(invocation, value)

    return callback


def _note_directory(invocation: Invocation, path: str) -> None:
    invocation.directory = path


def _note_trace(invocation: Invocation, path: str) -> None:
    invocation.trace = path


def _note_wait_for(invocation: Invocation, servers: int) -> None:
    invocation.wait_for = servers


def _note_json(invocation: Invocation, _: bool) -> None:
    invocation.console.json = True


def _note_quiet(invocation: Invocation, _: bool) -> None:
    _note_verbosity(invocation, -1)


def _note_verbose(invocation: Invocation, _: bool) -> None:
    _note_verbosity(invocation, 1)


def _note_verbosity(invocation: Invocation, verbosity: int) -> None:
    if invocation.console.verbosity == -verbosity:
        raise click.UsageError("choose one of -q and -v")
    invocation.console.verbosity = verbosity


def common_options(function: F) -> F:
    """Add the options that every command takes, before or after its name."""
    for option in (
        click.option(
            "--trace",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            expose_value=False,
            callback=_noting(_note_trace),
            help="Write what happened when to FILE, for a trace viewer.",
        ),
        click.option(
            "-v",
            "--verbose",
            is_flag=True,
            expose_value=False,
            callback=_noting(_note_verbose),
            help="Say more; show tracebacks.",
        ),
        click.option(
            "-q",
            "--quiet",
            is_flag=True,
            expose_value=False,
            callback=_noting(_note_quiet),
            help="Only results and errors.",
        ),
        click.option(
            "--json",
            is_flag=True,
            expose_value=False,
            callback=_noting(_note_json),
            help="Print results as JSON, one object a line.",
        ),
        click.option(
            "-d",
            "--directory",
            type=click.Path(file_okay=False),
            metavar="DIR",
            expose_value=False,
            callback=_noting(_note_directory),
            help="The client's directory.  [default: $PIPEGRID_DIR, or your own]",
        ),
    ):
        function = option(function)
    return function


def cap_arguments(function: F) -> F:
    """Add the arguments and the option that name files by their caps; ``files.named_files`` reads them."""
    return click.argument("caps", nargs=-1, metavar="CAP...")(cap_file_option(function))


def cap_file_option(function: F) -> F:
    """Add the option that names files whose caps stand in a file."""
    return click.option(
        "--cap-file",
        "--from",
        "cap_files",
        multiple=True,
        type=click.Path(allow_dash=True),
        metavar="FILE",
        help="Take caps from FILE, one a line, with or without names, as 'put -l' prints them; '-' is "
        "standard input. Then they stand neither in the shell's history nor in the list of processes.",
    )(function)


def check_caps(caps: tuple[str, ...], cap_files: tuple[str, ...]) -> None:
    """
    Raises:
        click.UsageError: neither caps nor a cap file were given.
    """
    context = click.get_current_context()
    if not caps and not cap_files:
        raise click.UsageError("Missing argument 'CAP...' or option '--cap-file'.", context)
    if "" in cap_files:
        raise click.UsageError(f"--cap-file: {EMPTY_NAME}", context)


def wait_option(function: F) -> F:
    """Add the option that says how many servers must be up."""
    return click.option(
        "--wait-for",
        type=click.IntRange(1, 4096),
        metavar="N",
        expose_value=False,
        callback=_noting(_note_wait_for),
        help="Begin when N servers have answered.  [default: when enough are known]",
    )(function)


def _note_max_segment(invocation: Invocation, size_bytes: int) -> None:
    invocation.max_segment_bytes = size_bytes


def segment_limit_option(function: F) -> F:
    """Add the option that lifts the bound on a file's segments."""
    return click.option(
        "--max-segment",
        type=byte_size,
        metavar="SIZE",
        expose_value=False,
        callback=_noting(_note_max_segment),
        help="Take files with segments up to SIZE; each is held in memory.  [default: 16MiB]",
    )(function)


def _note_limit_rate(invocation: Invocation, bytes_per_s: int) -> None:
    invocation.limit_rate = bytes_per_s


def _note_jobs(invocation: Invocation, jobs: int) -> None:
    invocation.jobs = jobs


def _note_max_memory(invocation: Invocation, size_bytes: int) -> None:
    invocation.max_memory_bytes = size_bytes


def read_only_option(function: F) -> F:
    """Add the option of printing the cap that is to be given away."""
    return click.option(
        "--read-only",
        is_flag=True,
        help="Print the cap that reads, and is to be given away, instead of the one that changes.",
    )(function)


def limit_options(function: F) -> F:
    """Add the options that bound how much a command does at once."""
    for option in (
        click.option(
            "--max-memory",
            type=memory_size,
            metavar="SIZE",
            expose_value=False,
            callback=_noting(_note_max_memory),
            help="Hold at most SIZE of data at once, beside what the program itself takes; at least 8MiB.  "
            "[default: 64MiB]",
        ),
        click.option(
            "--limit-rate",
            type=byte_size,
            metavar="SIZE",
            expose_value=False,
            callback=_noting(_note_limit_rate),
            help="Send at most SIZE a second, and receive as much, over all connections.",
        ),
        click.option(
            "--jobs",
            type=click.IntRange(1, 4096),
            metavar="N",
            expose_value=False,
            callback=_noting(_note_jobs),
            help="Work on at most N files at once.  [default: as many as memory and windows allow]",
        ),
    ):
        function = option(function)
    return function


def memory_size(text: str) -> int:
    """
    Return a number of bytes that a command can do with.

    Raises:
        click.BadParameter: it is none, or too little.
    """
    size = byte_size(text)
    if size < MIN_MEMORY_BYTES:
        raise click.BadParameter(
            f"{text!r} is too little; give at least {MIN_MEMORY_BYTES >> 20}MiB"
        )
    return size


def upkeep_bounds(invocation: Invocation) -> UpkeepSettings:
    """Return how much a command that looks after many objects does at once."""
    from pipegrid.transfer.settings import UpkeepSettings

    bounds = UpkeepSettings()
    jobs = bounds.jobs if invocation.jobs is None else invocation.jobs
    memory = invocation.max_memory_bytes
    return UpkeepSettings(jobs, bounds.memory_bytes if memory is None else memory)


def encoding_options(function: F) -> F:
    """Add the options that say how a file is encoded."""
    for option in (
        click.option(
            "--segment-size",
            "segment_bytes",
            type=byte_size,
            metavar="SIZE",
            help="Bytes of a file that are encoded together, such as 128KiB.  [default: the directory's; "
            "1MiB in a new one]",
        ),
        click.option(
            "-n",
            "--total",
            "total_shares",
            type=click.IntRange(1, 256),
            metavar="N",
            help="How many shares to make of a file, at most one for each server that shall hold one.  "
            "[default: the directory's; 10 in a new one, fewer if there are fewer servers]",
        ),
        click.option(
            "-k",
            "--required",
            "required_shares",
            type=click.IntRange(1, 256),
            metavar="K",
            help="How many of a file's shares restore it; the rest may be lost.  [default: the "
            "directory's; 3 in a new one, fewer if there are fewer than 7 servers]",
        ),
    ):
        function = option(function)
    return function


def happy_option(function: F) -> F:
    """Add the option that says when a file counts as stored."""
    return click.option(
        "--happy",
        type=click.IntRange(1, 256),
        metavar="H",
        help="How many servers must hold a share of their own, for a file to count as stored.  [default: the "
        "directory's, at most as many as there are shares; 7 in a new one, fewer if there are fewer servers]",
    )(function)


def key_options(function: F) -> F:
    """Add the options that say where a file's key comes from."""
    for option in (
        click.option(
            "--random-key",
            is_flag=True,
            help="Use a new key, so that nobody can tell whether they have the same file.",
        ),
        click.option(
            "--convergence",
            type=base32_bytes,
            metavar="BASE32",
            help="Secret that the key comes from, beside the content ('' for none): the same "
            "file under the same secret is stored once.",
        ),
    ):
        function = option(function)
    return function


def check_key_options(convergence: bytes | None, random_key: bool) -> None:
    """
    Raises:
        UsageError: both were given.
    """
    if random_key and convergence is not None:
        raise UsageError("a random key owes nothing to a convergence secret; give only one")


def choose_params(
    default: Params,
    required_shares: int | None,
    total_shares: int | None,
    segment_bytes: int | None,
) -> Params:
    """
    Return the parameters: what was given, else the default.

    Raises:
        UsageError: they do not go together.
    """
    from pipegrid.core.params import Params

    return Params(
        default.required_shares if required_shares is None else required_shares,
        default.total_shares if total_shares is None else total_shares,
        default.max_segment_bytes if segment_bytes is None else segment_bytes,
    )
