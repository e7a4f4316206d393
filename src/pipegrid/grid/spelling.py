"""
Whether a configuration says only what somebody reads: a setting with a slip in it would go unnoticed.

A name that nobody knows is refused with its file and line, and the name that was probably meant.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipegrid.core.text import decode_text
from pipegrid.disk.reading import read_file
from pipegrid.errors import UsageError
from pipegrid.grid.homes import CONFIG_NAME, TAHOE_CONFIG_NAME

KNOWN: Mapping[str, Collection[str] | None] = {
    "client": {
        "shares.needed",
        "shares.total",
        "shares.happy",
        "segment_size",
        "peers.preferred",
        "force_foolscap",
        "foolscap_beside",
        "ask_first",
        "introducer.furl",
        "mutable.format",
    },
    "grid_managers": None,
    "local": {"directory", "servers", "durability", "keep_unfinished"},
    "node": {"nickname", "tub.port", "tub.location"},
    "storage": {
        "enabled",
        "anonymous",
        "storage_dir",
        "reserved_space",
        "readonly",
        "force_foolscap",
        "keep_unfinished",
        "expire.enabled",
        "expire.mode",
        "expire.override_lease_duration",
        "expire.cutoff_date",
        "expire.immutable",
        "expire.mutable",
        "grid_management",
        "plugins",
    },
    "grid_manager_certificates": None,
}
"""What ``pipegrid.cfg`` may say: sections, and their settings; None: these have names of the user's own."""

KNOWN_OF_SERVERS = (
    "nickname",
    "anonymous-storage-FURL",
    "anonymous-storage-NURLs",
    "permutation-seed-base32",
    "grid-manager-certificates",
)
"""What is read of an announcement in ``servers.yaml``, which may say more: other programs read it too."""

_MAX_CONFIG_BYTES = 1 << 20
_SECTION = re.compile(r"\[(?P<name>[^\]]+)\]")
_SETTING = re.compile(r"(?P<name>[^\s:=#;\[][^:=]*)[:=]")


class SettingsFile(configparser.ConfigParser):
    """
    What a configuration says, and in which line.

    Args:
        path: what it is called in errors.
        text: all of it.
        strict: nothing may be said twice.

    Raises:
        configparser.Error: it makes no sense.
    """

    def __init__(self, path: Path, text: str, strict: bool) -> None:
        super().__init__(interpolation=None, strict=strict)
        self._called = str(path)
        self.read_string(text, self._called)
        self._said_in: dict[tuple[str, str], int] = {}
        self._section_lines: dict[str, int] = {}
        for number, section, setting in settings_in(text):
            if setting is None:
                self._section_lines.setdefault(section, number)
            else:
                self._said_in[section, self.optionxform(setting)] = number

    def at(self, section: str, option: str) -> str:
        """Return how an error about a setting begins: file, line, section and name."""
        number = self._said_in.get((section, self.optionxform(option)))
        return f"{self._called}{_line(number)}: [{section}] {option}"

    def at_section(self, section: str) -> str:
        """Return how an error about a section begins: file and line."""
        return f"{self._called}{_line(self._section_lines.get(section))}"


def _line(number: int | None) -> str:
    return "" if number is None else f":{number}"


def read_config(directory: Path) -> tuple[Path, SettingsFile]:
    """
    Return the directory's configuration file, and what is in it.

    Raises:
        UsageError: there is none, or it cannot be understood.
    """
    path = directory / CONFIG_NAME
    is_tahoe = not path.exists() and (directory / TAHOE_CONFIG_NAME).is_file()
    if is_tahoe:
        path = directory / TAHOE_CONFIG_NAME
    # Tahoe-LAFS lets an option be given twice.
    try:
        data = read_file(path, _MAX_CONFIG_BYTES + 1)
        if len(data) > _MAX_CONFIG_BYTES:
            raise UsageError(
                f"{path} is larger than {_MAX_CONFIG_BYTES} bytes; is it the right file?"
            )
        text = decode_text(data, str(path))
        parser = SettingsFile(path, text, strict=not is_tahoe)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{directory} is not a grid directory: it has no {CONFIG_NAME}; make one with "
            f"'pipegrid -d {directory} init'"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except configparser.Error as error:
        raise UsageError(
            f"cannot understand {path}: {ini_problem(error)}; correct it by hand"
        ) from error
    if not is_tahoe:  # of which ``tahoe_settings`` knows
        check_settings(path, parser, text)
    return path, parser


def check_settings(path: Path, parser: configparser.ConfigParser, text: str) -> None:
    """
    Look at every name in a ``pipegrid.cfg``.

    Args:
        text: the file's, in which lines are counted.

    Raises:
        UsageError: nobody reads one of them.
    """
    for number, section, setting in settings_in(text):
        where = f"{path}:{number}: "
        if section not in KNOWN:
            raise UsageError(
                f"{where}there is no section [{section}]{meant(section, KNOWN)}; correct it by hand"
            )
        settings = KNOWN[section]
        if setting is None or settings is None:
            continue
        name = parser.optionxform(setting)
        if name not in settings:
            elsewhere = [other for other, names in KNOWN.items() if names and name in names]
            hint = f" (it belongs into [{elsewhere[0]}])" if elsewhere else meant(name, settings)
            raise UsageError(
                f"{where}[{section}] has no setting {setting}{hint}; correct it by hand"
            )


def settings_in(text: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield the lines of a configuration that say something: number, section, and setting if it is one."""
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        if line[:1].isspace() or line[:1] in ("#", ";"):
            continue  # it goes on with the value of the setting before, or is a comment
        if found := _SECTION.match(line):
            section = found["name"]
            yield number, section, None
        elif found := _SETTING.match(line):
            yield number, section, found["name"].rstrip()


def meant(name: str, known: Collection[str]) -> str:
    """Return a hint at the name that was probably meant, in brackets; perhaps nothing."""
    from difflib import get_close_matches  # only mistakes need it

    lower = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f" (did you mean {lower[close[0]]}?)" if close else ""


def check_top_level(document: Any, expected: str, data: bytes, name: str) -> None:
    """
    Look at the names at the top of a YAML file, of which one is read.

    Raises:
        UsageError: there is another.
    """
    for key in document if isinstance(document, dict) else ():
        if key != expected:
            line = line_of(str(key), data)
            where = f"{name}:{line}" if line else name
            raise UsageError(
                f"{where}: {str(key)[:60]!r} is not read (did you mean {expected}?); correct it by hand"
            )


def line_of(key: str, data: bytes) -> int | None:
    """Return the first line of a YAML file that has this key at its very beginning."""
    pattern = re.compile(rb"""["']?%b["']?\s*:""" % re.escape(key.encode("utf-8", "replace")))
    for number, line in enumerate(data.splitlines(), 1):
        if pattern.match(line):
            return number
    return None


def near_misses(announcement: Mapping[Any, Any]) -> list[str]:
    """Return hints at names in a server's announcement that differ from those that are read by a slip."""
    found = []
    for key in announcement:
        if key not in KNOWN_OF_SERVERS:
            from difflib import get_close_matches

            lower = {known.lower(): known for known in KNOWN_OF_SERVERS}
            close = get_close_matches(str(key)[:60].lower(), lower, n=1, cutoff=0.9)
            if close:
                found.append(f"{str(key)[:60]!r} is not read (did you mean {lower[close[0]]}?)")
    return found


def yaml_problem(error: Exception) -> str:
    """Return where and what is wrong in a YAML file, as its parser tells it, on one line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    if mark is None or not problem:
        return (str(error).splitlines() or ["no YAML"])[0]
    hint = " (is it a tab? YAML wants blanks)" if "cannot start any token" in problem else ""
    return f"line {mark.line + 1}: {problem}{hint}"


def ini_problem(error: Exception) -> str:
    """Return where and what is wrong in an INI file, on one line."""
    first_line = (str(error).splitlines() or ["no text"])[0].rstrip(".")
    number = getattr(error, "lineno", None)
    if number is None and getattr(error, "errors", None):
        number = error.errors[0][0]  # type: ignore[attr-defined]
    if number is None:
        return first_line
    if isinstance(error, configparser.MissingSectionHeaderError):
        return f"line {number}: it stands in no [section]"
    if isinstance(error, configparser.ParsingError):
        return f"line {number}: it is no setting, which has a name, '=' and a value"
    if isinstance(error, configparser.DuplicateOptionError):
        return f"line {number}: [{error.section}] {error.option} is said twice"
    if isinstance(error, configparser.DuplicateSectionError):
        return f"line {number}: [{error.section}] is there twice"
    return f"line {number}: {first_line}"
