"""
What backups may be called, and whose a name is; pure, but for a look at whether a directory is still there.

Runs of one name are one series: '--keep-...' has its older runs forgotten, and 'restore' takes its newest. So
a directory, or a machine, does not come into another one's series unless somebody has said so.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable

from pipegrid.core.names import composed
from pipegrid.core.text import printable
from pipegrid.errors import UsageError
from pipegrid.tree.backup.catalogue import BackupRun, Machine

MAX_NAME_BYTES = 200


def check_name(name: str, listed: Iterable[BackupRun] = ()) -> str:
    """
    Return the name of a backup as it is listed: composed (NFC).

    Args:
        listed: runs whose names do, since versions of old took others.

    Raises:
        UsageError: it cannot be one.
    """
    name = composed(name)
    if _is_sensible(name) or (name and any(run.name == name for run in listed)):
        return name
    raise UsageError(
        f"{name!r} cannot be the name of a backup: choose one with --as that has a letter or digit, neither "
        f"'/' nor control characters, no blank at either end, and {MAX_NAME_BYTES} bytes at most, such as "
        "'home'"
    )


def _is_sensible(name: str) -> bool:
    # What does not show, or looks like nothing, is a slip: a variable that is not set, a key that was hit.
    shows = any(each.isalnum() or unicodedata.category(each) == "So" for each in name)
    fits = len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES
    return shows and fits and name.isprintable() and "/" not in name and name == name.strip()


def check_owner(runs: Iterable[BackupRun], name: str, root: str, machine: Machine) -> None:
    """
    Do nothing if a directory of this machine may go on with the runs of this name.

    A machine that has a run among them goes on: somebody has said so, or it was the first.

    Args:
        root: the absolute path of the directory.

    Raises:
        UsageError: they are another machine's, or those of another directory, which is still there.
    """
    same = [run for run in runs if run.name == name]
    ours = [run for run in same if run.machine.id in ("", machine.id)]
    theirs = [run for run in same if run.machine.id not in ("", machine.id)]
    if theirs and not any(run.machine.id for run in ours):
        newest = max(theirs, key=lambda run: run.time)
        where = (
            f"{newest.machine.name!r}, another machine"
            if newest.machine.name
            else "another machine"
        )
        raise _taken(name, f"{newest.directory or 'a directory'} on {where}", root)
    noted = [run for run in ours if run.directory]
    other = max(noted, key=lambda run: run.time).directory if noted else root
    try:
        if other == printable(root) or os.path.samefile(other, root):
            return
    except (OSError, ValueError):  # it was moved, perhaps to here; or is no path at all
        return
    raise _taken(name, other, root)


def _taken(name: str, by: str, root: str) -> UsageError:
    return UsageError(
        f"{name!r} is the backup of {printable(by)}: choose a name for that of {printable(root)} with --as, "
        f"or say '--as {name}' if both are to have the same one"
    )
