"""Common options and argument types of commands, with the completion of grid paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipegrid.cli import completion
from pipegrid.cli.command_job import Invocation
from pipegrid.cli.startup.fast_mirror_args import JSON, QUIET, Option
from pipegrid.core import base32
from pipegrid.errors import UsageError
from pipegrid.flow import rate_timetable
from pipegrid.grid import client_config, client_paths
from pipegrid.transfer import settings

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from pipegrid.core.encoding_parameters import Params


# Completion of arguments that may begin with an alias; the modules for it are imported only when needed.


def grid_path(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete aliases, and the names in a directory on the grid."""
    return completion.on_grid(_invocation(ctx), incomplete)


def any_path(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete aliases, the names in a directory on the grid, and local files."""
    return completion.anywhere(_invocation(ctx), incomplete)


def alias_name(
    ctx: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete aliases, without the colon."""
    return completion.aliases(_invocation(ctx), incomplete, "")


def _invocation(ctx: click.Context) -> Invocation:
    invocation = ctx.find_object(Invocation)
    assert invocation is not None
    return invocation


# Sizes and rates on the command line.

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def byte_size(text: str) -> int:
    """
    Parse a number of bytes: ``131072``, ``128KiB``, ``1.5MiB``; ``K`` is ``KiB``, ``kB`` is 1000.

    Raises:
        click.BadParameter: the text is not a size, or the size is zero.
    """
    match = re.fullmatch(r"\s*([0-9]{1,15})(?:\.([0-9]{1,3}))?\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[3].lower()) if match else None
    found = 0
    if match is not None and unit is not None:
        found = int(match[1] + (match[2] or "")) * unit // 10 ** len(match[2] or "")
    if found == 0:
        raise click.BadParameter(f"{text!r} is not a size such as 131072, 128KiB or 1MiB")
    return found


def byte_space(text: str) -> int:
    """
    Parse a number of bytes that may be zero: ``0``, or a size as for ``byte_size``.

    Raises:
        click.BadParameter: the text is neither.
    """
    return 0 if text.strip() == "0" else byte_size(text)


def byte_rate(text: str) -> int:
    """
    Parse bytes per second: a size as for ``byte_size``, with or without ``/s`` at its end.

    Raises:
        click.BadParameter: the text is not a size, or the size is zero.
    """
    try:
        return byte_size(text.strip().removesuffix("/s"))
    except click.BadParameter:
        raise click.BadParameter(
            f"{text!r} is not a number of bytes per second, such as 500kB, 2MiB or 1.5MB/s"
        ) from None


def rate_limit(text: str) -> rate_timetable.RateLimit | None:
    """
    Parse a rate limit: ``SIZE``, ``UP:DOWN``, or a timetable; return None for ``off``.

    Raises:
        click.BadParameter: the text is not a rate limit.
    """

    def rate(part: str) -> int:
        try:
            return byte_rate(part)
        except click.BadParameter as error:
            raise ValueError(error.message) from None

    try:
        return rate_timetable.parse_rate_limit(text, rate)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


# Common options and argument types.

F = TypeVar("F", bound=Callable[..., Any])

MIN_MEMORY_BYTES = 8 << 20
"""The smallest memory limit: an upload needs space for a few encoded segments of one MiB."""

EMPTY_NAME = "the name is empty; perhaps a variable is not set"


def kept_duration(text: str) -> int:
    """
    Parse a duration such as ``7 days``, ``12h`` or ``30 minutes``, and return it in seconds.

    Raises:
        click.BadParameter: the text is not a duration, or is less than a minute.
    """
    try:
        return client_config.parse_kept(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}") from None


def base32_bytes(text: str) -> bytes:
    """
    Decode base32, as in ``private/convergence``; empty text gives no bytes.

    Raises:
        click.BadParameter: the text is not base32.
    """
    try:
        return base32.decode(text.strip())
    except ValueError as error:
        raise click.BadParameter(
            f"{error}; copy all of the secret, as it is in 'private/convergence'"
        ) from None


def as_click(option: Option, **more: Any) -> Callable[[F], F]:
    """
    Return the click option for a declared option.

    Args:
        more: attributes of the click option, which override the declaration.
    """
    keywords: dict[str, Any] = {"help": option.help}
    if option.is_flag:
        keywords["is_flag"] = True
    elif option.is_repeated:
        keywords["multiple"] = True
        if option.default:
            keywords |= {"default": option.default, "show_default": ", ".join(option.default)}
    else:
        limits = option.limits
        kind = click.Choice(option.among) if limits is None else click.IntRange(*limits)
        keywords |= {"type": kind, "default": option.default, "show_default": True}
    return click.option(*option.flags, option.name, **{**keywords, **more})


def all_of(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds several options; the last is the first in the help."""

    def add(function: F) -> F:
        for option in options:
            function = option(function)
        return function

    return add


def as_one(
    name: str, make: Callable[..., Any], *options: Callable[[Any], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Return a decorator that adds several options and passes their values as one argument, ``name``.

    Args:
        make: returns the argument; it is called with the values by the options' names.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        others = len(getattr(function, "__click_params__", ()))
        found: Any = all_of(*options)(function)
        names = [each.name for each in found.__click_params__[others:]]
        return _gathering(name, make, names)(found)

    return add


def gathered(name: str, kind: type[tuple[Any, ...]]) -> Callable[[F], Callable[..., Any]]:
    """
    Return a decorator that passes several options as one argument, ``name``; put it right above the function.

    Args:
        kind: the type of the argument, a named tuple whose fields have the names of the options.
    """
    return _gathering(name, kind, kind._fields)  # type: ignore[attr-defined]


def _gathering(
    name: str, make: Callable[..., Any], names: Sequence[str]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def gather(*arguments: Any, **given: Any) -> Any:
            own = {each: given.pop(each) for each in names}
            return function(*arguments, **given, **{name: make(**own)})

        return gather

    return add


def _noting(note: Callable[[Invocation, Any], None]) -> Callable[..., None]:
    """Return a callback that calls ``note`` with the ``Invocation`` and an option's value, if it is given."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        invocation = ctx.find_object(Invocation)
        if value == "":
            raise click.BadParameter(EMPTY_NAME, ctx, param)
        if value and invocation is not None:
            note(invocation, value)

    return callback


def _noted(name: str, *declarations: str, **attributes: Any) -> Callable[[F], F]:
    """Return an option whose value is stored as the attribute ``name`` of the ``Invocation``."""
    note = _noting(lambda invocation, value: setattr(invocation, name, value))
    return click.option(*declarations, expose_value=False, callback=note, **attributes)


def _note_json(invocation: Invocation, _: bool) -> None:
    invocation.console.json = True


def _note_verbosity(invocation: Invocation, verbosity: int) -> None:
    if invocation.console.verbosity == -verbosity:
        raise click.UsageError("choose one of -q and -v")
    invocation.console.verbosity = verbosity


def _note_local(invocation: Invocation, _value: Any) -> None:
    place = str(client_paths.local_directory())
    if invocation.base_directory not in (None, place):
        raise click.UsageError("choose one of -d and --local")
    invocation.base_directory = place


init_options = all_of(
    _noted(
        "trace",
        "--trace",
        type=click.Path(dir_okay=False, readable=False),
        metavar="FILE",
        help="Write a trace of all operations to FILE, for a trace viewer.",
    ),
    click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_noting(lambda invocation, _: _note_verbosity(invocation, 1)),
        help="Print details and tracebacks.",
    ),
    as_click(
        QUIET,
        expose_value=False,
        callback=_noting(lambda invocation, _: _note_verbosity(invocation, -1)),
    ),
    as_click(JSON, expose_value=False, callback=_noting(_note_json)),
    _noted(
        "grid",
        "--grid",
        metavar="NAME",
        help="Use this one of your grids, as 'join' added it to [grids] of pipegrid.cfg.",
    ),
    _noted(
        "base_directory",
        "-d",
        "--directory",
        type=click.Path(file_okay=False, readable=False),
        metavar="DIR",
        help="The client's directory.  [default: $PIPEGRID_DIR, or your own]",
    ),
)

"""The common options without ``--local``, which has another meaning in ``init``."""

common_options = all_of(
    click.option(
        "--local",
        is_flag=True,
        expose_value=False,
        callback=_noting(_note_local),
        help="Use the grid on this machine, wherever 'init' moved it.",
    ),
    init_options,
)
"""The options of all commands except ``init``, which accept them before and after their names."""


def usage_error(text: str) -> click.UsageError:
    """Return the error for an invalid command line; it refers to the command's help."""
    return click.UsageError(text, click.get_current_context())


RELAY_URL = "ws://wormhole.tahoe-lafs.org:4000/v1"
"""The default relay for invitations; Tahoe-LAFS uses it, too."""

relay_option = click.option(
    "--relay-url",
    default=RELAY_URL,
    show_default=True,
    metavar="URL",
    help="The relay where both ends of an invitation meet; it learns nothing.",
)
"""The option for the relay through which an invitation is exchanged."""

CapArguments = tuple[tuple[str, ...], tuple[str, ...]]
"""The caps on a command line, and the paths of its cap files."""


def checked_caps(caps: tuple[str, ...], cap_files: tuple[str, ...]) -> CapArguments:
    """
    Return the caps and cap files of a command line, for ``cap_lookup.named_files``.

    Raises:
        click.UsageError: neither caps nor cap files were given, or the name of a cap file is empty.
    """
    if not caps and not cap_files:
        raise usage_error("Missing argument 'CAP...' or option '--cap-file'.")
    if "" in cap_files:
        raise usage_error(f"--cap-file: {EMPTY_NAME}")
    return caps, cap_files


cap_file_option = click.option(
    "--cap-file",
    "--from",
    "cap_files",
    multiple=True,
    type=click.Path(allow_dash=True, readable=False),
    metavar="FILE",
    help="Read caps from FILE, one per line, with or without names, as 'put -l' prints them; '-' is "
    "standard input. The caps then appear neither in the shell's history nor in the list of processes.",
)
"""The option for files to read caps from."""

cap_arguments = as_one(
    "caps",
    checked_caps,
    cap_file_option,
    click.argument("caps", nargs=-1, metavar="CAP...", shell_complete=grid_path),
)
"""The argument for caps and the option for cap files, passed as one argument; see ``checked_caps``."""

wait_option = _noted(
    "wait_for",
    "--wait-for",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Start when N servers have answered.  [default: when enough are known]",
)
"""The option for how many servers must respond before work begins."""

segment_limit_option = _noted(
    "max_segment_bytes",
    "--max-segment",
    type=byte_size,
    metavar="SIZE",
    help="Accept files with segments up to SIZE; each is held in memory.  [default: 16MiB]",
)
"""The option for the largest segment that a file may have."""

grid_options = all_of(common_options, wait_option)
"""Options of every command that uses the grid."""

reading_options = all_of(common_options, segment_limit_option, wait_option)
"""Options of commands that also read files or directories."""

human_option = click.option(
    "-h", "--human", is_flag=True, help="Show sizes with units, such as 1.23 MB."
)

NO_SHORT_HELP = {"help_option_names": ["--help"]}
"""click settings for a command with ``human_option``, whose ``-h`` is not the help."""

read_only_option = click.option(
    "--read-only",
    is_flag=True,
    help="Print the read cap, which can be shared, instead of the write cap.",
)

format_option = click.option(
    "--format",
    type=click.Choice(["sdmf", "mdmf"]),
    help="Format of the directory; sdmf suits all but huge ones.  [default: as configured, or sdmf]",
)


log_option = click.option(
    "--log",
    "log_path",
    type=click.Path(dir_okay=False, readable=False),
    metavar="FILE",
    help="Append the log to FILE, as JSON, one object per line; SIGHUP opens it again.",
)
"""The option for the log file of a command that serves."""

connection_limit_options = all_of(
    click.option(
        "--max-per-address",
        type=click.IntRange(min=1),
        metavar="N",
        help="Connections from one address at a time.  [default: half of all]",
    ),
    click.option(
        "--max-connections",
        type=click.IntRange(min=16),
        metavar="N",
        help="Connections at a time; the limit of open files may allow less.  [default: 1000]",
    ),
)
"""The options that limit how many connections a server accepts."""


def memory_size(text: str) -> int:
    """
    Parse a memory limit.

    Raises:
        click.BadParameter: the text is not a size, or is less than ``MIN_MEMORY_BYTES``.
    """
    size = byte_size(text)
    if size < MIN_MEMORY_BYTES:
        raise click.BadParameter(
            f"{text!r} is too small; give at least {MIN_MEMORY_BYTES >> 20}MiB"
        )
    return size


def upkeep_bounds(invocation: Invocation) -> settings.UpkeepSettings:
    """Return the limits on concurrent work and memory for a command that processes many objects."""
    limits = {"jobs": invocation.jobs, "memory_bytes": invocation.max_memory_bytes}
    return settings.UpkeepSettings(**given(limits))


def exact_modes_option(what_else: str) -> Callable[[F], F]:
    """
    Return the option that restores modes with all their bits.

    Args:
        what_else: the end of the help, which says what happens without the option.
    """
    return click.option(
        "--exact-modes",
        is_flag=True,
        help=f"Restore all bits of the stored modes, set-user-ID too.  {what_else}",
    )


owner_options = all_of(
    click.option(
        "--numeric-owner",
        is_flag=True,
        help="Restore the numbers of owners, not their names.  [default: by name; by number where this "
        "machine has no such name]",
    ),
    click.option(
        "--no-owner", is_flag=True, help="Do not restore owners; everything belongs to you."
    ),
)
"""The options that choose the owners of restored files."""


def max_paths_option(default: str) -> Callable[[F], F]:
    """Return the option that limits how many files, directories and links a fetched tree may have."""
    return click.option(
        "--max-paths",
        type=click.IntRange(1),
        metavar="N",
        help=f"Stop if a tree has more than N files, directories and links.  [default: {default}]",
    )


limit_options = all_of(
    _noted(
        "max_memory_bytes",
        "--max-memory",
        type=memory_size,
        metavar="SIZE",
        help="Hold at most SIZE of data at once, in addition to what the program itself "
        "takes; at least 8MiB.  "
        "[default: 64MiB]",
    ),
    _noted(
        "limit_rate",
        "--limit-rate",
        type=rate_limit,
        metavar="RATE",
        help="Send and receive at most RATE per second each, over all connections, such as 500kB; or UP:DOWN "
        "for each, or a timetable such as '08:00,1M:2M 19:00,off'.",
    ),
    _noted(
        "jobs",
        "--jobs",
        type=click.IntRange(1, 4096),
        metavar="N",
        help="Work on at most N files at once.  [default: as many as memory and windows allow]",
    ),
)
"""The options that limit memory, rates and concurrent work."""

Encoding = dict[str, int | None]
"""Values of the encoding options, by the names of fields of ``Params``; None: not given."""

encoding_options = as_one(
    "encoding",
    Encoding,
    click.option(
        "--segment-size",
        "max_segment_bytes",
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
        help="How many shares to make of a file, at most one for each server.  "
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
)
"""The options for how files are encoded."""

happy_option = click.option(
    "--happy",
    type=click.IntRange(1, 256),
    metavar="H",
    help="How many servers must each hold a share of their own before a file counts as stored.  [default: "
    "the "
    "directory's, at most as many as there are shares; 7 in a new one, fewer if there are fewer servers]",
)
"""The option for when a file counts as stored."""


def _key(convergence: bytes | None, random_key: bool) -> dict[str, Any]:
    if random_key and convergence is not None:
        raise UsageError("a random key needs no convergence secret; give only one of the two")
    return {"convergence": convergence, "random_key": random_key}


key_options = as_one(
    "key",
    _key,
    click.option(
        "--random-key",
        is_flag=True,
        help="Use a random key, so that no other client can find out whether it has the same file.",
    ),
    click.option(
        "--convergence",
        type=base32_bytes,
        metavar="BASE32",
        help="Secret from which the key is made, in addition to the content ('' for none): the same "
        "file under the same secret is stored once.",
    ),
)
"""The options for the keys of files, passed as arguments of ``Grid.put``."""


def choose_params(default: Params, encoding: Encoding) -> Params:
    """
    Return encoding parameters: the given values, and ``default`` for the others.

    Raises:
        UsageError: the values contradict each other.
    """
    import attrs

    return attrs.evolve(default, **given(encoding))


def given(options: dict[str, int | None]) -> dict[str, Any]:
    """Return the options that have a value other than None."""
    return {name: value for name, value in options.items() if value is not None}
