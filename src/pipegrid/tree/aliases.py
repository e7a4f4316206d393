"""Aliases, which are local names for directories, in Tahoe-LAFS's file ``private/aliases``."""

from __future__ import annotations

import fcntl
import os
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipegrid.core.caps import DirectoryCap, parse_cap
from pipegrid.core.text import decode_text, printable
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.part_file import NO_LOCKS
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import CapError, SinkError, UsageError
from pipegrid.grid.client_paths import ALIASES_NAME
from pipegrid.tree.backup.run_times import looks_like_run

ROOT_NAME = "root_dir.cap"
DEFAULT = "tahoe"
"""The name of the alias for the cap in ``root_dir.cap``."""

MAX_FILE_BYTES = 1 << 20
MAX_ALIASES = 10_000
MAX_NAME_CHARACTERS = 100

_LOCK_TRIES = 40
_LOCK_WAIT_S = 0.05


def read_aliases(directory: Path) -> dict[str, str]:
    """
    Return the caps of a client directory's aliases by name; the caps are not checked.

    Each line of the file is ``NAME: CAP``; if several lines have the same name, the last one counts. The cap
    in ``private/root_dir.cap``, which old gateways wrote, is the alias ``tahoe`` unless the file has an alias
    of that name. For comparison, names are normalized (NFC).

    Raises:
        UsageError: the file cannot be read, is not text, or is too large.
    """
    path = directory / ALIASES_NAME
    found: dict[str, str] = {}
    for line in _text(path).split("\n"):
        named = _named(line)
        if named is not None:
            found[named[0]] = named[1]
        if len(found) > MAX_ALIASES:
            raise UsageError(f"{path} has more than {MAX_ALIASES} aliases; remove some by hand")
    if DEFAULT not in found:
        root = _text(directory / "private" / ROOT_NAME).strip()
        if root:
            found[DEFAULT] = root
    return found


def as_written(name: str, aliases: Mapping[str, str]) -> str | None:
    """
    Return an alias as the file spells it, which may not be normalized (NFC); None if the alias does not
    exist.
    """
    if name in aliases:
        return name
    composed = unicodedata.normalize("NFC", name)
    return next((each for each in aliases if unicodedata.normalize("NFC", each) == composed), None)


def add_alias(directory: Path, name: str, cap: str) -> None:
    """
    Add an alias for a directory; all other lines of the file stay as they are, including comments and
    malformed lines.

    Args:
        directory: the client's directory, which has a configuration.
        cap: the cap of a directory of any kind; a prefix ``ro.`` or ``imm.`` is removed.

    Raises:
        CapError: ``cap`` is not the cap of a directory.
        UsageError: the name cannot be used, or exists already.
        SinkError: the file cannot be written.
    """
    name = checked_name(name)
    parsed = parse_cap(cap.strip())
    if not isinstance(parsed, DirectoryCap):
        raise CapError("this is not the cap of a directory, and an alias stands for one")
    with _locked(directory):
        check_free(directory, name)
        path = directory / ALIASES_NAME
        data = _read(path)
        if data and not data.endswith(b"\n"):
            data += b"\n"
        data += f"{name}: {parsed}\n".encode()
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{path} would be too large; remove aliases that are not needed")
        _write(path, data)


def remove_alias(
    directory: Path, name: str, on_replaced: Callable[[str], object] = lambda cap: None
) -> str:
    """
    Remove an alias and return its cap. The directory itself does not change.

    Args:
        on_replaced: called with each cap that the file has for the name, before the alias is removed; if this
            call raises, the alias stays.

    Raises:
        UsageError: the alias does not exist, or its cap is only in ``root_dir.cap``.
        SinkError: the file cannot be written.
    """
    name = name.strip().removesuffix(":")
    with _locked(directory):
        path = directory / ALIASES_NAME
        aliases = read_aliases(directory)
        written = as_written(name, aliases)
        if written is None:
            raise unknown_alias(name, aliases)
        data = _read(path)
        kept = [line for line in data.splitlines(keepends=True) if not _names(line, written)]
        if len(b"".join(kept)) == len(data):
            raise UsageError(
                f"the alias '{printable(written)}' comes from {directory / 'private' / ROOT_NAME}, which "
                "another program wrote; remove it by hand"
            )
        caps = [
            named[1]
            for line in decode_text(data, str(path)).split("\n")
            if (named := _named(line)) and named[0] == written
        ]
        for cap in dict.fromkeys(reversed(caps)):
            on_replaced(cap)
        _write(path, b"".join(kept))
    return aliases[written]


def checked_name(text: str) -> str:
    """
    Return the name of an alias, checked and normalized (NFC), without a trailing colon.

    Raises:
        UsageError: an alias cannot have this name.
    """
    name = unicodedata.normalize("NFC", text.strip().removesuffix(":"))
    bad = not name or not name.isprintable() or any(each in name for each in " :/\\")
    if bad or name.startswith(("#", "-", ".")) or name in ("URI", "ro.URI", "imm.URI"):
        raise UsageError(
            f"'{printable(name[:20])}' cannot be an alias; choose a name without spaces, colons and slashes"
        )
    if looks_like_run(name):
        raise UsageError(
            f"'{printable(name[:40])}' cannot be an alias, since it could be a run of a backup, which is "
            "written NAME@TIME; choose another name"
        )
    if len(name) > MAX_NAME_CHARACTERS:
        raise UsageError(
            f"an alias has at most {MAX_NAME_CHARACTERS} characters; choose a shorter one"
        )
    return name


def check_free(directory: Path, name: str) -> None:
    """
    Check that no alias has this name.

    Raises:
        UsageError: an alias has this name.
    """
    if as_written(name, read_aliases(directory)) is not None:
        raise UsageError(
            f"the alias '{printable(name)}' exists already; choose another name, or remove it first with "
            "'pipegrid alias remove'"
        )


def no_alias(name: str) -> str:
    """Return the clause which says that an alias does not exist; a long name is ``shortened``."""
    return f"there is no alias '{shortened(name)}'"


def shortened(text: str) -> str:
    """
    Return the start of a path or an alias for a message; the text may be a mistyped cap, which is secret.
    """
    return printable(text[:12] + ("..." if len(text) > 12 else ""))


def unknown_alias(
    name: str, aliases: Mapping[str, str], unconfigured: Path | None = None
) -> UsageError:
    """
    Return the error for an unknown alias; its message suggests an existing alias with a similar name.

    Args:
        unconfigured: the client's directory, if it has no configuration.
    """
    missing = no_alias(name)
    if unconfigured is not None:
        return UsageError(
            f"{missing}, since nothing is configured in {unconfigured}; name a "
            "client's directory with 'pipegrid -d DIR', or make one with 'pipegrid init'"
        )
    import difflib  # only needed after a mistake

    near = difflib.get_close_matches(name[:MAX_NAME_CHARACTERS], list(aliases)[:1000], 1)
    if near:
        return UsageError(f"{missing}; did you mean '{printable(near[0])}'?")
    return UsageError(
        f"{missing}; 'pipegrid alias list' lists the existing ones, and a path is written ALIAS:some/path "
        "or CAP/some/path"
    )


def _named(line: str) -> tuple[str, str] | None:
    text = line.strip("\ufeff \t\r\n")
    if not text or text.startswith("#"):
        return None
    name, found, cap = text.partition(":")
    return (name, cap.strip()) if found else None


def _names(line: bytes, name: str) -> bool:
    named = _named(line.decode("utf-8"))
    return named is not None and named[0] == name


def _text(path: Path) -> str:
    return decode_text(_read(path), str(path))


def _read(path: Path) -> bytes:
    try:
        data = read_file(path, MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UsageError(f"cannot read the aliases in {path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path} has more than {MAX_FILE_BYTES} bytes, too many for aliases")
    return data


def _write(path: Path, data: bytes) -> None:
    """
    Write the aliases file, readable only by its owner; a symbolic link stays, and its target is replaced.
    """
    try:
        replace_file(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise SinkError(
            f"cannot write the aliases to {path}: {error.strerror}; nothing was changed: free some space, "
            "or make it writable"
        ) from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other PipeGrid processes from changing the aliases."""
    private = directory / "private"
    try:
        private.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SinkError(f"cannot write aliases below {private}: {error.strerror}") from error
    try:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise SinkError(f"cannot lock {private}: {error.strerror}") from error
                break  # this file system has no locks: go on without one
            time.sleep(_LOCK_WAIT_S)
        else:
            raise UsageError("another command is changing the aliases; try again when it is done")
        yield
    finally:
        os.close(fd)
