"""
The caps that a client's directory keeps. A prune must not release what is reachable from these caps.

They are all caps in the files of ``private``: aliases, ``root_dir.cap``, the accounts of SFTP, pins, and what
other programs keep there. Pins are caps that a user keeps for no other purpose: lines ``NAME: CAP`` in
``private/pins``.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import attrs

from pipegrid.core.caps import Cap, DirectoryCap, LitCap, UnknownCap, parse_cap
from pipegrid.core.text import decode_text, printable
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import open_locked, read_file
from pipegrid.errors import CannotReach, CapError, SinkError, UsageError
from pipegrid.tree.directory_reading import kind_of

PINS_NAME = "pins"
MAX_PINS = 10_000
MAX_NAME_BYTES = 200

_MAX_FILE_BYTES = 8 << 20
_CAP = re.compile(rb"URI:[A-Za-z0-9:+-]+")


@attrs.frozen
class Root:
    """
    A cap that is kept.

    Attributes:
        name: a name for messages, such as "the alias 'home'".
    """

    name: str
    cap: Cap


def kept_caps(directory: Path) -> list[Root]:
    """
    Return all caps in the files of a client's ``private``.

    Raises:
        CannotReach: a file cannot be read, or has a malformed cap.
    """
    found: dict[Cap, Root] = {}
    for path in _files(directory / "private"):
        try:
            data = read_file(path, _MAX_FILE_BYTES + 1)
        except OSError as error:
            raise _unreadable(path, error.strerror or str(error)) from error
        if b"\0" in data[:4096]:  # a database or key, in which caps cannot be found
            continue
        if len(data) > _MAX_FILE_BYTES:
            raise _unreadable(path, f"it has more than {_MAX_FILE_BYTES} bytes; move it away")
        for text in _CAP.findall(data):
            try:
                cap = parse_cap(text.decode("ascii"))
            except CapError as error:
                raise _unreadable(path, f"it has a damaged cap: {error}") from error
            found.setdefault(cap, Root(f"a cap in {path}", cap))
    return list(found.values())


def tahoe_backup_objects(directory: Path) -> Iterator[bytes]:
    """
    Yield the storage indexes that this node's ``tahoe backup`` has recorded as stored, and would not send
    again.

    Raises:
        CannotReach: the database of ``tahoe backup`` cannot be read.
    """
    path = directory / "private/backupdb.sqlite"
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
            tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}
            for table, column in (("caps", "filecap"), ("directories", "dircap")):
                if table not in tables:
                    continue
                for (text,) in base.execute(f"SELECT {column} FROM {table}"):
                    cap = parse_cap(str(text))
                    index = None if isinstance(cap, UnknownCap) else cap.storage_index
                    if index is not None:
                        yield index
    except (sqlite3.Error, CapError) as error:
        raise _unreadable(path, str(error)) from error


def _files(private: Path) -> list[Path]:
    try:
        return sorted(path for path in private.iterdir() if path.is_file())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(private, error.strerror or str(error)) from error


def _unreadable(path: Path, reason: str) -> CannotReach:
    return CannotReach(
        f"cannot use {path}, so what it keeps is not known, and nothing was released: {reason}"
    )


# Pins.


def read_pins(directory: Path) -> dict[str, Cap]:
    """
    Return the pinned caps of a client's directory by name.

    Raises:
        UsageError: the file cannot be read, or has a malformed line.
    """
    path = directory / "private" / PINS_NAME
    try:
        text = decode_text(read_file(path, _MAX_FILE_BYTES), str(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    found: dict[str, Cap] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        name, _, text_of_cap = line.rpartition(": ")
        try:
            cap = parse_cap(text_of_cap.strip())
        except CapError as error:
            raise UsageError(f"line {number} of {path}: {error}; correct or remove it") from error
        if not name or isinstance(cap, UnknownCap):
            raise UsageError(f"line {number} of {path} is not 'NAME: CAP'; correct or remove it")
        found[name] = cap
    return found


def add_pin(directory: Path, name: str, cap: Cap) -> None:
    """
    Add a pin, which keeps a cap.

    Raises:
        CapError: the cap cannot be kept: no server stores anything for it, or it does not show what is
            reachable from it.
        UsageError: a pin cannot have this name, or the name keeps another cap.
        SinkError: the file cannot be written.
    """
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(cap, UnknownCap) or (isinstance(cap, DirectoryCap) and kind_of(cap) == "unknown"):
        raise CapError(
            "this cap does not show what it reaches, so that cannot be kept; pin a read cap"
        )
    if isinstance(file, LitCap) and not isinstance(cap, DirectoryCap):
        raise CapError("this cap contains the whole file, so no server has anything to keep")
    name = name.strip()
    if not name or not name.isprintable() or len(name.encode("utf-8")) > MAX_NAME_BYTES:
        raise UsageError(f"{printable(name)!r} cannot be the name of a pin; give another NAME")
    with _changed_pins(directory) as pins:
        if pins.get(name, cap) != cap:
            raise UsageError(
                f"the pin '{printable(name)}' keeps another cap; remove it first with 'pipegrid unpin', or "
                "give another NAME"
            )
        if len(pins) >= MAX_PINS:
            raise UsageError(
                f"there are {MAX_PINS} pins already; remove some with 'pipegrid unpin'"
            )
        pins[name] = cap


def remove_pin(directory: Path, name: str) -> Cap:
    """
    Remove a pin; return its cap.

    Args:
        name: the name of the pin, or the pinned cap.

    Raises:
        UsageError: the pin does not exist.
        SinkError: the file cannot be written.
    """
    with _changed_pins(directory) as pins:
        found = next((each for each, cap in pins.items() if name in (each, str(cap))), None)
        if found is None:
            raise UsageError(f"there is no pin '{printable(name)}'; see 'pipegrid pins'")
        return pins.pop(found)


@contextmanager
def _changed_pins(directory: Path) -> Iterator[dict[str, Cap]]:
    """Lock the pins and yield them; then write the changed pins, durably and atomically."""
    private = directory / "private"
    path = private / "pins.lock"
    try:
        private.mkdir(mode=0o700, exist_ok=True)
        lock = open_locked(str(path), os.O_RDWR | os.O_CREAT, wait=True, mode=0o600)
    except OSError as error:
        raise SinkError(f"cannot lock {path}: {error.strerror or error}") from error
    assert lock is not None
    try:
        pins = read_pins(directory)
        yield pins
        path = private / PINS_NAME
        text = "".join(f"{name}: {cap}\n" for name, cap in pins.items())
        try:
            replace_file(path, text.encode("utf-8"))
        except OSError as error:
            raise SinkError(f"cannot write {path}: {error.strerror}") from error
    finally:
        os.close(lock)
