"""The location of a client's directory, and the names of its files."""

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
    Return the user's own directory: $PIPEGRID_DIR, or ``pipegrid`` in the user's data directory.

    Raises:
        UsageError: the user has no home directory, or the variable is not an absolute path.
    """
    explicit = os.environ.get("PIPEGRID_DIR")
    if explicit:
        return expanded(explicit, Path(), "$PIPEGRID_DIR")
    return _users("XDG_DATA_HOME", ".local/share") / "pipegrid"


def own_directory(given: str | None) -> Path:
    """
    Return the client's directory: the given one, or by default the user's own.

    Raises:
        UsageError: as for ``default_directory``.
    """
    return Path(given) if given else default_directory()


def local_directory() -> Path:
    """
    Return the directory of the user's grid on this machine: the default one, or the one to which ``init``
    moved it.

    Raises:
        UsageError: no such grid exists, or ``default_directory`` fails.
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
    """
    Return the path to which ``init`` moves a grid on this machine when another grid needs its directory.
    """
    return directory.with_name(f"{directory.name}-local")


def cache_directory() -> Path:
    """
    Return the user's cache directory, whose content may be lost; raises the errors of ``default_directory``.
    """
    return _users("XDG_CACHE_HOME", ".cache") / "pipegrid"


def state_directory() -> Path:
    """
    Return the directory for state that must not be lost and must not be written into a Tahoe-LAFS node's
    directory; raises the errors of ``default_directory``.
    """
    return _users("XDG_DATA_HOME", ".local/share") / "pipegrid-nodes"


def expanded(text: str, base: Path, what: str) -> Path:
    """
    Return the path that a setting means: ``~`` and ``~user`` at its beginning are home directories, and a
    relative path is relative to ``base``.

    Args:
        what: the setting's name for errors, such as "FILE: [local] directory".

    Raises:
        UsageError: the user does not exist; or the expanded path does not exist, but a directory whose name
            contains the literal ``~`` does. Old versions made such directories, and stored data there.
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

    A relative path in the environment variable is ignored, as the XDG Base Directory specification requires.
    Otherwise each working directory would have a different grid.
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
    Return the user's home directory; None if the user has none, as in a container without an account for the
    user.

    An empty or relative HOME is ignored. Services and cron jobs may have an empty HOME, which ``Path.home``
    takes for the root directory.
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
