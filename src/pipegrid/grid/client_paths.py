"""Where a client's directory is, and what its files are called."""

from __future__ import annotations

import os
from pathlib import Path
from pwd import getpwuid

from pipegrid.errors import UsageError, naming

CONFIG_NAME = "pipegrid.cfg"
TAHOE_CONFIG_NAME = "tahoe.cfg"
SERVERS_NAME = "private/servers.yaml"
INTRODUCERS_NAME = "private/introducers.yaml"
ALIASES_NAME = "private/aliases"
CATALOGUE_NAME = "private/backup/catalogue.cap"


def default_directory() -> Path:
    """
    Return the user's own directory: $PIPEGRID_DIR, or ``pipegrid`` among the user's data.

    Raises:
        UsageError: nobody knows where those are, or the variable names no directory of anybody's.
    """
    explicit = os.environ.get("PIPEGRID_DIR")
    if explicit:
        return expanded(explicit, Path(), "$PIPEGRID_DIR")
    return _users("XDG_DATA_HOME", ".local/share") / "pipegrid"


def local_directory() -> Path:
    """
    Return the directory of the user's grid on this machine: where it was made, or where ``init`` moved it.

    Raises:
        UsageError: there is none, or as ``default_directory`` does.
    """
    own = default_directory()
    for place in (aside_of(own), own):
        try:
            if b"[local]" in (place / CONFIG_NAME).read_bytes():
                return place
        except OSError:  # noqa: PERF203  it is not there
            continue
    raise UsageError(
        f"there is no grid on this machine in {own}; make one with 'pipegrid -d DIR init --local', where "
        f"DIR is a new directory, such as {aside_of(own)}"
    )


def aside_of(directory: Path) -> Path:
    """Return where a grid on this machine is moved when its directory is needed for another grid."""
    return directory.with_name(f"{directory.name}-local")


def cache_directory() -> Path:
    """Return where the user has what may be lost; raises as ``default_directory`` does."""
    return _users("XDG_CACHE_HOME", ".cache") / "pipegrid"


def state_directory() -> Path:
    """
    Return where the user has what must not be lost and belongs to directories of others; raises as
    ``default_directory`` does.
    """
    return _users("XDG_DATA_HOME", ".local/share") / "pipegrid-nodes"


def expanded(text: str, base: Path, what: str) -> Path:
    """
    Return the path that a setting means: ``~`` and ``~user`` at its beginning are home directories, and what
    is relative is so to ``base``.

    Args:
        what: names it, such as "FILE: [local] directory".

    Raises:
        UsageError: there is no such user; or what it means is not there, while a directory with that very
            name is, which versions of old made of it, and which has whatever they stored.
    """
    if not text.startswith("~"):
        return base / text
    user, _, below = text.partition("/")
    home = _home() if user == "~" else None
    meant = os.path.expanduser(text) if home is None else os.path.join(home, below)
    if (user == "~" and home is None) or meant.startswith("~"):
        raise UsageError(
            f"{what} is {text!r}, and the home directory {user} is not known; write the whole path, or "
            f"'./{text}' for a directory of that very name"
        )
    written = base / text
    if os.path.isdir(written) and not os.path.lexists(meant):
        raise UsageError(
            f"{what} is {text!r}, which means {meant}; that does not exist, but {written} does, which "
            f"earlier versions used; move that to {meant}, or write './{text}'"
        )
    return base / meant


def _users(variable: str, usual: str) -> Path:
    """
    Return one of the user's base directories.

    A variable with a relative path counts as none, as its specification (XDG Base Directory) wants: each
    working directory would have a grid of its own, in which nothing is found that another one has.
    """
    base = os.environ.get(variable, "")
    if os.path.isabs(base):
        return Path(base)
    home = _home()
    if home is None:
        text = "your home directory is not known; set HOME, or give its directory"
        raise naming(UsageError(text), "give its directory")
    return home / usual


def _home() -> Path | None:
    """
    Return the user's home directory; None for a container's user, whom no list of users has.

    An empty HOME, as services and cron jobs may have, would be the root directory to ``Path.home``, and a
    relative one another place in each working directory.
    """
    home = os.environ.get("HOME", "")
    if os.path.isabs(home):
        return Path(home)
    try:
        return Path(getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def is_configured(directory: Path) -> bool:
    """Return whether the directory holds a client's configuration."""
    return (directory / CONFIG_NAME).is_file() or (directory / TAHOE_CONFIG_NAME).is_file()
