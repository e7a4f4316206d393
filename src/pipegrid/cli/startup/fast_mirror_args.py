"""
A fast parser for simple command lines of commands that often end before click is imported.

For a clone of a thousand small files, or a check of them, parsing the command line with click took a third of
the time. This parser handles the usual spelling, with the same declarations of options that click gets
(``cmd_mirror``). Everything else, including help and mistakes, is left to click.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pipegrid.cli.command_job import Job
    from pipegrid.cli.console import Console
    from pipegrid.mirror.preconnect_mirrors import EarlySockets
    from pipegrid.mirror.stat_cache import QuickCheckResult

    Values = dict[str, Any]
    Read = tuple[str, Values, list[str]]
    """Command, options, and arguments."""

COMPLETION = "_PIPEGRID_COMPLETE"
"""The environment variable with which a shell's script asks click for completions."""


class Option:
    """
    One option, declared once: for this parser, and for click (``options.as_click``).

    Args:
        flags: the spellings of the option.
        name: the name of the parameter for its value.
        help: the help text.
        default: the value if the option is not given; False: the option is a flag; a tuple: it may be
            repeated.
        among: the possible values, if they are few.
        limits: the smallest and the largest number.
        unlike: beginnings of values that click must parse.
    """

    def __init__(
        self,
        flags: tuple[str, ...],
        name: str,
        help: str,
        default: Any = False,
        among: tuple[str, ...] = (),
        limits: tuple[int, int] | None = None,
        unlike: tuple[str, ...] = (),
    ) -> None:
        self.flags = flags
        self.name = name
        self.help = help
        self.default = default
        self.among = among
        self.limits = limits
        self.unlike = unlike

    @property
    def is_flag(self) -> bool:
        """Whether the option takes no value."""
        return self.default is False

    @property
    def is_repeated(self) -> bool:
        """Whether the option may be given several times."""
        return isinstance(self.default, tuple)

    def take(self, values: Values, text: str) -> bool:
        """Store the option's value in ``values``; return False if click must check the value."""
        if self.is_repeated:
            values[self.name] = (*values.get(self.name, ()), text)
            return bool(text) and not text.startswith(self.unlike)
        if self.limits is None:
            values[self.name] = text
            return text in self.among
        if not text.isascii() or not text.isdigit() or len(text) > 4:
            return False
        values[self.name] = int(text)
        return self.limits[0] <= int(text) <= self.limits[1]


JSON = Option(("--json",), "json", "Print results as JSON, one object per line.")
QUIET = Option(("-q", "--quiet"), "quiet", "Print only results and errors.")
PARANOID = Option(
    ("--paranoid",), "paranoid", "Hash all existing files, even those that were verified before."
)
DELETE = Option(
    ("--delete",), "delete", "When all files exist, remove files from DEST that are not wanted."
)
FROM = Option(
    ("--from",),
    "urls",
    "URL of a mirror; may be given several times: mirrors share the work.",
    (),
    unlike=("mirror",),  # the beginning of a list of mirrors
)
DURABILITY = Option(
    ("--durability",),
    "durability",
    "When a file appears under its name: at once, when its group is on the disk, or when it is itself.",
    "batch",
    among=("none", "batch", "strict"),
)
CONNECTIONS = Option(
    ("--connections",), "connections", "Connections to each mirror, at most.", 4, limits=(1, 64)
)
JOBS = Option(
    ("--jobs",),
    "jobs",
    "Processes that share the work and the connections, if one processor is too slow.",
    1,
    limits=(1, 64),
)
NEWEST_ONLY = Option(
    ("--newest-only",),
    "newest_only",
    "Of packages with the same name and architecture, mirror only the highest version.",
)
KEEP_GOING = Option(
    ("--keep-going",),
    "keep_going",
    "Publish the new indexes even if no mirror has some of their files; those are listed, with status 1.",
)
KEYRING = Option(("--keyring",), "keyrings", "Keys that may sign the index, binary or as text.", ())
UNSIGNED = Option(("--allow-unsigned",), "allow_unsigned", "Check no signature: trust the mirror.")
SUITE = Option(
    ("--suite",),
    "suites",
    "A suite, such as sid; may be given several times. That of a flat archive ends in a slash: / or "
    "its directory.",
    (),
)
COMPONENT = Option(
    ("--component",),
    "components",
    "A component, such as main; may be given several times.  [default: all that the release file names]",
    (),
)
ARCHITECTURE = Option(
    ("--arch",),
    "architectures",
    "An architecture of binary packages; may be given several times.",
    ("amd64",),
)
SOURCE = Option(("--source",), "source", "Sources, too.")
IGNORE_DATES = Option(
    ("--ignore-dates",),
    "ignore_dates",
    "Accept release files that have expired, as those of frozen suites, or that have a date in the future.",
)
INDEXES = Option(
    ("--indexes",),
    "indexes",
    "How indexes are kept; unpacked and zstd ones are brought up to date by patches.",
    "packed",
    among=("packed", "unpacked", "zstd"),
)
DIFFS = Option(
    ("--diffs",), "diffs", "Mirror the patches of the indexes, too, for clients of this mirror."
)
ALSO = Option(
    ("--also",),
    "also",
    "Other files that the release file names, such as 'main/i18n/Translation-en.*'.",
    (),
)

COMMON = (JSON, QUIET)
"""The options that are also accepted before the command."""

FETCH = (*COMMON, DELETE, PARANOID, FROM, DURABILITY, CONNECTIONS)

COMMANDS: dict[str, tuple[tuple[Option, ...], int]] = {
    "mirror list": ((*FETCH, JOBS), 2),
    "mirror rpm": ((*FETCH, NEWEST_ONLY, KEEP_GOING, KEYRING, UNSIGNED), 1),
    "mirror debian": (
        (
            *(*FETCH, SUITE, COMPONENT, ARCHITECTURE, SOURCE, KEEP_GOING, KEYRING, UNSIGNED),
            *(INDEXES, DIFFS, IGNORE_DATES, ALSO),
        ),
        1,
    ),
    "mirror verify": ((*COMMON, PARANOID), 1),
}
"""The commands that are parsed here, with their options and their number of arguments."""


def read(arguments: Sequence[str]) -> Read | None:
    """Parse a command line; return None if click must parse it."""
    if COMPLETION in os.environ:
        return None
    values: Values = {}
    words: list[str] = []
    known: tuple[Option, ...] = COMMON
    count = 0
    rest = iter(arguments)
    for each in rest:
        if not each.startswith("-"):
            words.append(each)
            if len(words) == 2:
                known, count = COMMANDS.get(" ".join(words), ((), 0))
            continue
        flag, mark, text = each.partition("=")
        option = next((one for one in known if flag in one.flags), None)
        if option is None or (option.is_flag and mark):
            return None
        if option.is_flag:
            values[option.name] = True
            continue
        text = text if mark else next(rest, "")
        if text.startswith("-") or not option.take(values, text):
            return None
    if not count or len(words) != 2 + count or not all(words):
        return None
    if any(one in known and one.name not in values for one in (FROM, SUITE)):
        return None
    if "allow_unsigned" in values and "keyrings" in values:
        return None
    return words[1], {**{one.name: one.default for one in known}, **values}, words[2:]


def dial(found: Read) -> EarlySockets | None:
    """
    Begin to connect to the mirrors, before the modules that use the connections are loaded; return None
    without mirrors or with a proxy.
    """
    command, values, words = found
    if "urls" not in values or any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    from pipegrid.mirror.preconnect_mirrors import EarlySockets, connections_for

    count = 1
    if command == "list":
        each = values["connections"]
        count = connections_for(words[0], words[1], each // min(values["jobs"], each))
    return EarlySockets(values["urls"], count)


def cut_short(found: Read) -> int | QuickCheckResult | None:
    """
    Do a command that can end before its usual modules are loaded.

    Returns:
        The exit status if the command is done; else the result of the quick check, if there is one.
    """
    command, values, words = found
    if command != "verify" or values["paranoid"]:
        return None
    from pipegrid.cli.startup.fast_mirror_verify import verify_if_same

    return verify_if_same(words[0], values["json"], values["quiet"])


def plain_job(
    arguments: Sequence[str],
    console: Console,
    begun: EarlySockets | None = None,
    glimpse: QuickCheckResult | None = None,
) -> Job | None:
    """
    Return the job of a command line, and set the console's options; return None if click must parse it.

    Args:
        begun: the result of ``dial``; ``glimpse``: the result of ``cut_short``.
    """
    found = read(arguments)
    if found is None:
        return None
    command, values, words = found
    if command == "verify":
        if not (os.path.isdir(words[0]) and os.access(words[0], os.R_OK)):
            return None
        from pipegrid.cli.mirror_verify import verify_job

        found_already = () if glimpse is None else (glimpse,)
        job: Job = verify_job(words[0], values["paranoid"], 0.0, *found_already)
    else:
        job = _fetching_job(command, values, words, begun)
    console.json = values["json"]
    if values["quiet"]:
        console.verbosity = -1
    return job


def _fetching_job(
    command: str, values: Values, words: list[str], begun: EarlySockets | None
) -> Job:
    from pipegrid.cli.mirror_options import MirrorOptions

    shared = [each.name for each in FETCH if each not in COMMON]
    fetching = MirrorOptions(**{name: values[name] for name in shared}, begun=begun)
    if command == "list":
        from pipegrid.cli.mirror_listed_files import list_job

        return list_job(words[0], words[1], values["jobs"], fetching)
    from pipegrid.cli.mirror_debian_rpm import DebianOptions, RpmOptions, debian_job, rpm_job

    own = {name: value for name, value in values.items() if name not in shared}
    del own["json"], own["quiet"]
    if command == "rpm":
        return rpm_job(words[0], RpmOptions(**own), fetching, None)
    return debian_job(words[0], DebianOptions(**own), fetching)
