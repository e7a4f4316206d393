"""
The options of the last start of ``pipegrid serve``, which a later start in the same directory uses again.

``private/serve.json`` has the options that decide where the server listens, who finds it and how much space
it takes. A setting in ``pipegrid.cfg`` or ``tahoe.cfg`` takes precedence over this file, and the command line
over both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipegrid.core.text import amount, printable
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.private_files import make_directory
from pipegrid.errors import UsageError
from pipegrid.grid import serve_settings
from pipegrid.grid.servers_and_introducers_yaml import read_bounded
from pipegrid.server.onion_service import KEY_NAME

if TYPE_CHECKING:
    from pipegrid.server.serve import StorageNode

NAME = "private/serve.json"

_KINDS: Mapping[str, type] = {
    "port": str,
    "location": str,
    "storage": str,
    "reserved_bytes": int,
    "quota_bytes": int,
    "nickname": str,
    "introducers": list,
    "tor": bool,
    "tor_control_port": str,
}
_OF_THE_WAY = ("port", "location", "tor_control_port")
"""Options that are not taken from the last start if only one of the two starts is an onion service."""

_OPTIONS = {
    "reserved_bytes": "--reserved-space",
    "quota_bytes": "--quota",
    "introducers": "--introducer",
}
_ANY_PORT = re.compile(r"\A(?:tcp:)?(?:port=)?0(?=[:,]|\Z)")


class RestoredOptions(NamedTuple):
    """
    The options that a start takes from the last start.

    Attributes:
        values: the options that are not given now, by their names.
        notes: sentences about options that are taken from the last start, or that the settings contradict.
    """

    values: dict[str, Any]
    notes: list[str]


def restored(
    directory: Path, options: Mapping[str, Any], found: serve_settings.ServerDirectory
) -> RestoredOptions:
    """
    Return the options of the last start that neither the command line nor the settings replace.

    Args:
        options: the options of the command line, by their names.
        found: the settings of the directory.

    Raises:
        UsageError: the record of the last start is damaged; or the server was an onion service, and nothing
            says whether it still is one.
    """
    known, given = read(directory), _given(options)
    fixed = fixed_by(found)
    is_onion = given.get("tor", "tor" in fixed or known.get("tor"))
    if is_onion is None and (directory / KEY_NAME).exists():
        raise UsageError(
            f"{directory} was an onion service, since it has {KEY_NAME}; give "
            "--tor to hide it again, or --no-tor to serve openly what is known by the same key"
        )
    if bool(known.get("tor")) != bool(is_onion):
        known = {name: value for name, value in known.items() if name not in _OF_THE_WAY}
    notes = []
    over = {
        name: value
        for name, value in known.items()
        if name not in given and name != "tor" and fixed.get(name, value) != value
    }
    if over:
        notes.append(
            f"no longer as at the last start, since the settings in {directory} say otherwise: {_shown(over)}"
        )
    used = {name: value for name, value in known.items() if name not in given and name not in fixed}
    if shown := _shown({name: value for name, value in used.items() if value is not False}):
        notes.append(f"as at the last start: {shown} ({directory / NAME})")
    once = {name: value for name, value in given.items() if fixed.get(name, value) != value}
    if once:
        notes.append(
            f"for this start alone, since the settings in {directory} say otherwise: {_shown(once)}"
        )
    used = {name: tuple(value) if name == "introducers" else value for name, value in used.items()}
    return RestoredOptions(used, notes)


def fixed_by(found: serve_settings.ServerDirectory) -> dict[str, Any]:
    """Return the options that the settings of a directory determine, by their names."""
    said = {
        name: value
        for name, value in found.settings.items()
        if name in _KINDS and name not in found.detected
    }
    if "storage" in said:
        said["storage"] = str(said["storage"])
    if "onion" in found.settings:
        said["tor"] = True
    if found.tor_control is not None or found.find_control is not None:
        said["tor_control_port"] = "configured"
    if found.announces:
        said["introducers"] = ["configured"]
    return said


def keep(directory: Path, options: Mapping[str, Any], node: StorageNode) -> str | None:
    """
    Record the options with which a server has started, for later starts.

    Args:
        options: the options that were given or taken from the last start, by their names.

    Returns:
        A sentence if writing failed or an option has changed; else None.
    """
    fixed = fixed_by(serve_settings.load(directory))
    values = {name: value for name, value in _given(options).items() if name not in fixed}
    if "port" in values:
        values["port"] = kept_port(values["port"], node)
    known = read(directory)
    if values == known:
        return None
    path = directory / NAME
    kept = {**values, **_inside(values, directory)}
    data = json.dumps(kept, indent=1, sort_keys=True).encode("ascii") + b"\n"
    try:
        make_directory(path.parent, 0o700)
        replace_file(path, data)
    except OSError as error:
        return (
            f"cannot write {path}: {error.strerror}; give the same options again at the next start"
        )
    if changed := {name: old for name, old in known.items() if values.get(name, old) != old}:
        return f"the last start had {_shown(changed)}; later starts do as this one ({path})"
    return None


def kept_port(port: str, node: StorageNode) -> str:
    """
    Return the port for later starts: the port that the system chose instead of 0, since clients know it.
    """
    return _ANY_PORT.sub(f"tcp:{node.listening_port}", port) if node.listening_port else port


def is_known(directory: Path) -> bool:
    """Return whether a directory has a record of the options of a start."""
    return (directory / NAME).exists()


def read(directory: Path) -> dict[str, Any]:
    """
    Return the options of the last start, by their names.

    Raises:
        UsageError: the file cannot be read, or is damaged.
    """
    path = directory / NAME
    data = read_bounded(path)
    if data is None:
        return {}
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not all(
        type(value) is _KINDS.get(name) and (type(value) is not int or value >= 0)
        for name, value in values.items()
    ):
        raise UsageError(
            f"cannot understand {path}; restore it, or remove it and give the options of the server again"
        )
    if not all(isinstance(each, str) for each in values.get("introducers", [])):
        raise UsageError(f"cannot understand {path}: its introducers must be texts; restore it")
    if "storage" in values:
        values["storage"] = str(directory.absolute() / values["storage"])
    return values


def _inside(values: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """
    Return the storage's path relative to the node's directory, so that both can be moved together; return
    nothing if the storage is not in that directory.
    """
    storage = Path(values.get("storage", "/"))
    if not storage.is_relative_to(directory.absolute()):
        return {}
    return {"storage": str(storage.relative_to(directory.absolute()))}


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options that the record can have."""
    values = {name: options[name] for name in _KINDS if options[name] not in (None, ())}
    if "introducers" in values:
        values["introducers"] = list(values["introducers"])
    if "storage" in values:
        values["storage"] = str(Path(values["storage"]).absolute())
    return values


def _shown(values: Mapping[str, Any]) -> str:
    """Return options as they are on a command line, without the secrets of introducers."""
    words = []
    for name in _KINDS:
        if (value := values.get(name)) is None:
            continue
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        if isinstance(value, bool):
            words.append(option if value else "--no-tor")
        elif isinstance(value, list):
            words += [
                f"{option} {printable(str(each).rpartition('/')[0] or each)}" for each in value
            ]
        else:
            words.append(
                f"{option} {amount(value) if isinstance(value, int) else printable(value)}"
            )
    return ", ".join(words)
