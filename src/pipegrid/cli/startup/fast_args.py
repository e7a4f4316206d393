"""
Command lines that are plainly right, of commands that are often over before click is imported.

Of a clone of a thousand small files, or a look at them, a third was the reading of the command line. What
is written as most people and all scripts write it is read here, with what ``cmd_mirror``
declares repeated in two small tables (a test holds them to each other). Anything else, help
and every mistake included, is click's to understand, which then says what is wrong.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for here
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pipegrid.cli.console import Console
    from pipegrid.cli.job import Job
    from pipegrid.mirror.preconnect_mirrors import EarlySockets
    from pipegrid.mirror.quick_check import QuickCheckResult

    Values = dict[str, Any]
    Take = Callable[[Values, str], bool]
    Read = tuple[str, Values, list[str]]
    """Command, options, and what else there is."""

COMPLETION = "_PIPEGRID_COMPLETE"
"""In the environment: a shell asks what could come next, which is click's to answer."""


def _one(name: str, among: Sequence[str]) -> Take:
    def take(values: Values, text: str) -> bool:
        values[name] = text
        return text in among

    return take


def _number(name: str, least: int, most: int) -> Take:
    def take(values: Values, text: str) -> bool:
        if not text.isascii() or not text.isdigit() or len(text) > 4:
            return False
        values[name] = int(text)
        return least <= int(text) <= most

    return take


def _each(name: str) -> Take:
    def take(values: Values, text: str) -> bool:
        values[name] = (*values.get(name, ()), text)
        return bool(text)

    return take


def _url(values: Values, text: str) -> bool:
    values["urls"] = (*values.get("urls", ()), text)
    return bool(text) and not text.startswith("mirror")  # a list of mirrors is no mirror


FLAGS = {
    "--json": "json",
    "-q": "quiet",
    "--quiet": "quiet",
    "--delete": "delete",
    "--paranoid": "paranoid",
    "--newest-only": "newest_only",
    "--allow-unsigned": "allow_unsigned",
    "--source": "source",
    "--diffs": "diffs",
    "--ignore-dates": "ignore_dates",
    "--keep-going": "keep_going",
}
COMMON = ("--json", "-q", "--quiet")
"""Of these; they may stand before the command, too."""

TAKES: dict[str, Take] = {
    "--from": _url,
    "--durability": _one("durability", ("none", "batch", "strict")),
    "--connections": _number("connections", 1, 64),
    "--jobs": _number("jobs", 1, 64),
    "--keyring": _each("keyrings"),
    "--suite": _each("suites"),
    "--component": _each("components"),
    "--arch": _each("architectures"),
    "--also": _each("also"),
    "--indexes": _one("indexes", ("packed", "unpacked", "zstd")),
}
_FETCH: Values = {
    "json": False,
    "quiet": False,
    "delete": False,
    "paranoid": False,
    "urls": (),
    "durability": "batch",
    "connections": 4,
}
LIST: Values = {**_FETCH, "jobs": 1}
"""What ``mirror list`` takes of these, and what it is if it is not given."""

RPM: Values = {
    **_FETCH,
    "newest_only": False,
    "keep_going": False,
    "keyrings": (),
    "allow_unsigned": False,
}
"""The same of ``mirror rpm``."""

DEBIAN: Values = {
    **_FETCH,
    "suites": (),
    "components": (),
    "architectures": ("amd64",),
    "source": False,
    "keep_going": False,
    "keyrings": (),
    "allow_unsigned": False,
    "indexes": "packed",
    "diffs": False,
    "ignore_dates": False,
    "also": (),
}
"""The same of ``mirror debian``."""

VERIFY: Values = {"json": False, "quiet": False, "paranoid": False}
"""The same of ``mirror verify``."""

_COMMANDS: dict[str, tuple[Values, int]] = {
    "mirror list": (LIST, 2),
    "mirror rpm": (RPM, 1),
    "mirror debian": (DEBIAN, 1),
    "mirror verify": (VERIFY, 1),
}
"""What each takes, and how many words behind its name."""


def read(arguments: Sequence[str]) -> Read | None:
    """Return what a command line says; None: click is to look at it."""
    if COMPLETION in os.environ:
        return None
    values: Values = {}
    words: list[str] = []
    rest = iter(arguments)
    for each in rest:
        if not each.startswith("-"):
            words.append(each)
            continue
        if len(words) < 2 and each not in COMMON:
            return None
        if each in FLAGS:
            values[FLAGS[each]] = True
            continue
        name, mark, text = each.partition("=")
        take = TAKES.get(name)
        text = text if mark else next(rest, "")
        if take is None or text.startswith("-") or not take(values, text):
            return None
    known, count = _COMMANDS.get(" ".join(words[:2]), ({}, 0))
    if not known or len(words) != 2 + count or not all(words) or not values.keys() <= known.keys():
        return None
    if any(name in known and name not in values for name in ("urls", "suites")):
        return None
    if "allow_unsigned" in values and "keyrings" in values:
        return None
    return words[1], {**known, **values}, words[2:]


def dial(found: Read) -> EarlySockets | None:
    """Begin to connect to mirrors before anything is loaded that will talk to them, if that can be."""
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
    Do what is over before all that a command usually needs is loaded.

    Returns:
        The exit status; else what was found until then, or None.
    """
    command, values, words = found
    if command != "verify" or values["paranoid"]:
        return None
    from pipegrid.cli.startup.fast_verify import verify_if_same

    return verify_if_same(words[0], values["json"], values["quiet"])


def plain_job(
    arguments: Sequence[str],
    console: Console,
    begun: EarlySockets | None = None,
    glimpse: QuickCheckResult | None = None,
) -> Job | None:
    """
    Return what a command line asks for, having told the console what is for it; None: as ``read``.

    Args:
        begun: what ``dial`` made of it; ``glimpse``: what ``cut_short`` did.
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
    from pipegrid.cli.mirror_job import MirrorOptions

    fetching = MirrorOptions(
        urls=values["urls"],
        to_grid=False,
        delete=values["delete"],
        dry_run=False,
        connections=values["connections"],
        limit_bytes_per_s=None,
        durability=values["durability"],
        sample=0.0,
        paranoid=values["paranoid"],
        begun=begun,
        keep_going=values.get("keep_going", False),
    )
    if command == "list":
        from pipegrid.cli.mirror_list import list_job

        return list_job(words[0], words[1], values["jobs"], fetching)
    from pipegrid.cli.mirror_archive import SELECTING, debian_job, rpm_job

    trust = values["keyrings"], values["allow_unsigned"]
    if command == "rpm":
        return rpm_job(words[0], values["newest_only"], *trust, fetching)
    selecting = {name: values[name] for name in SELECTING}
    return debian_job(words[0], selecting, *trust, fetching)
