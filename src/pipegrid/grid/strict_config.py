"""Strict reading of YAML and INI files, with bounds; errors for unknown names have the file and the line."""

from __future__ import annotations

import configparser
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipegrid.core.text import decode_text
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.grid.client_paths import CONFIG_NAME, TAHOE_CONFIG_NAME

# An unknown name is an error, since a mistyped setting would otherwise be ignored silently. The error has the
# file, the line, and the name that was probably meant.

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
    "grids": None,
    "local": {"directory", "servers", "durability", "keep_unfinished"},
    "connections": {"tcp"},
    "socks": {"port", "username", "password"},
    "tor": {"enabled", "socks.port", "control.port", "launch", "tor.executable"},
    "node": {
        "nickname",
        "tub.port",
        "tub.location",
        "web.port",
        "web.static",
        "tempdir",
        "reveal-ip-address",
    },
    "storage": {
        "enabled",
        "anonymous",
        "storage_dir",
        "reserved_space",
        "quota",
        "readonly",
        "force_foolscap",
        "keep_unfinished",
        "announce",
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
    "sftpd": {"enabled", "port", "accounts.file", "host_pubkey_file", "host_privkey_file"},
}
"""The sections and settings of ``pipegrid.cfg``; None if the user chooses the names in a section."""

_BACKUP = "backup "
"""Start of a section name ``backup NAME``. Its settings are options of a command, which checks them."""


def is_backup_section(section: str) -> bool:
    """Return whether a section configures a backup."""
    return section.startswith(_BACKUP) and bool(backup_name(section))


def backup_name(section: str) -> str:
    """Return the name of the backup that a section configures."""
    return section.removeprefix(_BACKUP).strip()


KNOWN_OF_SERVERS = (
    "nickname",
    "anonymous-storage-FURL",
    "anonymous-storage-NURLs",
    "permutation-seed-base32",
    "grid-manager-certificates",
)
"""Names that PipeGrid reads in an announcement in ``servers.yaml``. Other programs may use further names."""

_MAX_CONFIG_BYTES = 1 << 20
_SECTION = re.compile(r"\[(?P<name>[^\]]+)\]")
_SETTING = re.compile(r"(?P<name>[^\s:=#;\[][^:=]*)[:=]")


class RefusedSetting(UsageError):
    """
    A setting about privacy or trust cannot be followed, so nothing is sent; the error text names the setting.
    """


class SettingsFile(configparser.ConfigParser):
    """
    The settings of a configuration file, with their line numbers.

    Attributes:
        path: the path of the file.

    Args:
        path: the file's name in errors.
        text: the whole text of the file.
        strict: a repeated section or setting is an error.

    Raises:
        configparser.Error: the text is not an INI file.
    """

    def __init__(self, path: Path, text: str, strict: bool) -> None:
        super().__init__(interpolation=None, strict=strict)
        self.path = path
        self.read_string(text, str(path))
        self._said_in: dict[tuple[str, str], int] = {}
        self._section_lines: dict[str, int] = {}
        for number, section, setting in settings_in(text):
            if setting is None:
                self._section_lines.setdefault(section, number)
            else:
                self._said_in[section, self.optionxform(setting)] = number

    def at(self, section: str, option: str) -> str:
        """Return the beginning of an error about a setting: file, line, section and name."""
        number = self._said_in.get((section, self.optionxform(option)))
        return f"{self.path}{_line(number)}: [{section}] {option}"

    def at_section(self, section: str) -> str:
        """Return the beginning of an error about a section: file and line."""
        return f"{self.path}{_line(self._section_lines.get(section))}"


def _line(number: int | None) -> str:
    return "" if number is None else f":{number}"


def read_config(directory: Path) -> tuple[Path, SettingsFile]:
    """
    Return the path of a directory's configuration file, and its settings.

    Raises:
        UsageError: the directory has no configuration file, or it cannot be parsed.
    """
    path = directory / CONFIG_NAME
    is_tahoe = not path.exists() and (directory / TAHOE_CONFIG_NAME).is_file()
    if is_tahoe:
        path = directory / TAHOE_CONFIG_NAME
    # Tahoe-LAFS accepts repeated options.
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
    if not is_tahoe:  # ``tahoe_settings_check`` checks the names in a ``tahoe.cfg``
        check_settings(path, parser, text)
    return path, parser


def check_settings(path: Path, parser: configparser.ConfigParser, text: str) -> None:
    """
    Check every name in a ``pipegrid.cfg``.

    Args:
        text: the text of the file, for line numbers.

    Raises:
        UsageError: a section or setting is unknown.
    """
    for number, section, setting in settings_in(text):
        where = f"{path}:{number}: "
        if is_backup_section(section):
            continue
        if section not in KNOWN:
            known = [*KNOWN, f"{_BACKUP}NAME"]
            raise UsageError(
                f"{where}there is no section [{section}]{closest_name(section, known)}; correct it by hand"
            )
        settings = KNOWN[section]
        if setting is None or settings is None:
            continue
        name = parser.optionxform(setting)
        if name not in settings:
            elsewhere = [other for other, names in KNOWN.items() if names and name in names]
            hint = (
                f" (it belongs in [{elsewhere[0]}])" if elsewhere else closest_name(name, settings)
            )
            raise UsageError(
                f"{where}[{section}] has no setting {setting}{hint}; correct it by hand"
            )


def settings_in(text: str) -> Iterator[tuple[int, str, str | None]]:
    """
    Yield the line number, the section, and the setting (None in a section's own line) of each line that
    begins a section or a setting.
    """
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        if line[:1].isspace() or line[:1] in ("#", ";"):
            continue  # a comment, or more of the previous setting's value
        if found := _SECTION.match(line):
            section = found["name"]
            yield number, section, None
        elif found := _SETTING.match(line):
            yield number, section, found["name"].rstrip()


def closest_name(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """
    Return a hint, in brackets, with the name that was probably meant; empty if no name is similar.

    Args:
        cutoff: the least similarity, from 0 to 1.
    """
    from difflib import get_close_matches  # needed only for mistakes

    lower = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), lower, n=1, cutoff=cutoff)
    return f" (did you mean {lower[close[0]]}?)" if close else ""


def check_top_level(document: Any, expected: str, data: bytes, name: str) -> None:
    """
    Check that a YAML file has only the expected name at its top level.

    Raises:
        UsageError: the file has another name at its top level.
    """
    for key in document if isinstance(document, dict) else ():
        if key != expected:
            line = line_of(str(key), data)
            where = f"{name}:{line}" if line else name
            raise UsageError(
                f"{where}: {str(key)[:60]!r} is not read (did you mean {expected}?); correct it by hand"
            )


def line_of(key: str, data: bytes) -> int | None:
    """
    Return the number of the first line of a YAML file that begins with a key, without indentation; None if
    there is none.
    """
    pattern = re.compile(rb"""["']?%b["']?\s*:""" % re.escape(key.encode("utf-8", "replace")))
    lines = enumerate(data.splitlines(), 1)
    return next((number for number, line in lines if pattern.match(line)), None)


def near_misses(announcement: Mapping[Any, Any]) -> list[str]:
    """Return hints for names in a server's announcement that are probably mistyped."""
    found = []
    for key in announcement:
        if key not in KNOWN_OF_SERVERS:
            text = str(key)[:60]
            if hint := closest_name(text, KNOWN_OF_SERVERS, 0.9):
                found.append(f"{text!r} is not read{hint}")
    return found


def yaml_problem(error: Exception) -> str:
    """Return the YAML parser's error, with its place in the file, as one line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    if mark is None or not problem:
        return (str(error).splitlines() or ["no YAML"])[0]
    hint = " (is it a tab? YAML needs spaces)" if "cannot start any token" in problem else ""
    return f"line {mark.line + 1}: {problem}{hint}"


def ini_problem(error: Exception) -> str:
    """Return the INI parser's error, with its place in the file, as one line."""
    first_line = (str(error).splitlines() or ["no text"])[0].rstrip(".")
    number = getattr(error, "lineno", None)
    if number is None and getattr(error, "errors", None):
        number = error.errors[0][0]  # type: ignore[attr-defined]
    if number is None:
        return first_line
    if isinstance(error, configparser.MissingSectionHeaderError):
        return f"line {number}: it is in no [section]"
    if isinstance(error, configparser.ParsingError):
        return f"line {number}: it is not a setting, which has a name, '=' and a value"
    if isinstance(error, configparser.DuplicateOptionError):
        return f"line {number}: [{error.section}] {error.option} is set twice"
    if isinstance(error, configparser.DuplicateSectionError):
        return f"line {number}: [{error.section}] exists twice"
    return f"line {number}: {first_line}"


# libyaml parses the user's YAML files if PyYAML was built with libyaml: in an eighth of the time of PyYAML's
# own parser.
#
# **Bounds.** The caller bounds the bytes. With aliases, a short file can expand to more values than fit in
# memory when they are copied or printed (merge keys, ``<<``, copy at once); so the values of a file with
# aliases are counted as if each alias were expanded. Some 30 000 levels of nesting overflow libyaml's stack,
# which kills the process. So if the file has enough brackets or indentation for that, its depth is measured
# before parsing; the measurement takes as long as parsing.

MAX_NODES = 1_000_000
"""The most values in a file with aliases; the entry of a server has about a dozen."""

MAX_DEPTH = 100
"""The deepest allowed nesting; a ``servers.yaml`` has five levels."""

_BRACKETS = 5000
_INDENTATION = re.compile(rb"[ \t?:-]{1000}")


def parse_yaml(data: bytes, name: str) -> Any:
    """
    Return the content of one of the user's YAML files.

    Args:
        name: the file's name, for errors.

    Raises:
        UsageError: the bytes are not text (see ``decode_text``) or not YAML, or exceed a bound.
    """
    import yaml  # a slow import

    data = decode_text(data, name).encode("utf-8")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if loader is not yaml.SafeLoader and _may_be_deep(data):
            _check_depth(loader(data))
        has_aliases = b"*" in data
        document = yaml.load(data, _bounded(loader) if has_aliases else loader)
        if has_aliases and _nodes(document, {}) > MAX_NODES:
            raise ValueError(_TOO_MUCH)
        if _is_deep(document):
            raise ValueError(_TOO_DEEP)
        return document
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UsageError(
            f"cannot understand {name}: {yaml_problem(error)}; correct it by hand"
        ) from error


def repeated_keys(data: bytes, key: str) -> list[tuple[str, int]]:
    """
    Return the repeated keys of the map below a top-level key, with the line of each repetition. For such a
    key, the last value is in effect.

    Args:
        data: the bytes of a file that ``parse_yaml`` has accepted.
    """
    import yaml

    repeated = []
    root: Any = yaml.compose(data, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for name, entries in root.value if isinstance(root, yaml.MappingNode) else ():
        if name.value != key or not isinstance(entries, yaml.MappingNode):
            continue
        seen: set[str] = set()
        for each, _ in entries.value:
            if isinstance(each, yaml.ScalarNode):
                if each.value in seen:
                    repeated.append((each.value, each.start_mark.line + 1))
                seen.add(each.value)
    return repeated


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
_TOO_MUCH = f"its aliases stand for more than {MAX_NODES} values"


def _may_be_deep(data: bytes) -> bool:
    """Return whether the bytes have enough brackets or indentation for nesting deeper than ``MAX_DEPTH``."""
    return data.count(b"[") + data.count(b"{") > _BRACKETS or _INDENTATION.search(data) is not None


def _check_depth(parser: Any) -> None:
    """
    Check how deeply a file is nested, by parsing its structure without its values.

    Raises:
        ValueError: the nesting is too deep.
    """
    from yaml.events import CollectionEndEvent, CollectionStartEvent

    depth = 0
    while parser.check_event():
        event = parser.get_event()
        if isinstance(event, CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(_TOO_DEEP)
        elif isinstance(event, CollectionEndEvent):
            depth -= 1


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, (dict, list)) for each in level)


def _bounded(loader: Any) -> Any:
    """
    Return a loader that counts the values that merge keys copy, and raises an error if there are too many.
    """
    from yaml.constructor import ConstructorError

    class Bounded(loader):  # type: ignore[misc]
        merged = 0

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            self.merged += len(node.value)
            if self.merged > MAX_NODES:
                raise ConstructorError(None, None, _TOO_MUCH, node.start_mark)

    return Bounded


def _nodes(value: Any, known: dict[int, int]) -> int:
    """
    Return the number of values in a value with all aliases expanded; more than ``MAX_NODES`` if a value
    contains itself.
    """
    children: list[Any] = []
    if isinstance(value, dict):
        children = [*value.keys(), *value.values()]
    elif isinstance(value, (list, set)):
        children = list(value)
    if not children:
        return 1
    if id(value) not in known:
        known[id(value)] = MAX_NODES + 1  # for a value that contains itself
        known[id(value)] = 1 + sum(_nodes(each, known) for each in children)
    return known[id(value)]
