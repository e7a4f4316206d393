"""
Which machine this is, for the list of runs: several may share one.

``/etc/machine-id`` tells it wherever there is one: it is made when a system is installed, and copying a
client's directory does not copy it. It is told to nobody as it is (its manual wants that), only a hash of it.
Elsewhere, as in containers, a random id beside what backups remember stands for it, as long as that is kept.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from pipegrid.core.hashes import tagged_hash
from pipegrid.disk.reading import read_file
from pipegrid.disk.replacing import replace_file
from pipegrid.tree.backup.catalogue import Machine

SYSTEM_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_OWN_NAME = "machine"
_TAG = b"pipegrid_backup_machine_v1"
_MAX_BYTES = 100
_ID_BYTES = 8


def this_machine(directory: Path, keep: bool = True) -> Machine:
    """
    Return which one this is.

    Args:
        directory: where backups remember things; it is there.
        keep: an id that has to be made is written down.

    Raises:
        OSError: an id had to be made, and could not be written.
    """
    return Machine(_id(directory, keep), os.uname().nodename)


def _id(directory: Path, keep: bool) -> str:
    for path in SYSTEM_FILES:
        with suppress(OSError):
            text = read_file(Path(path), _MAX_BYTES).strip()
            if re.fullmatch(rb"[0-9a-f]{32}", text):  # 'uninitialized' while a system boots first
                return tagged_hash(_TAG, text)[:_ID_BYTES].hex()
    own = directory / _OWN_NAME
    with suppress(OSError):
        text = read_file(own, _MAX_BYTES).strip()
        if re.fullmatch(rb"[0-9a-f]{16}", text):
            return text.decode("ascii")
    made = os.urandom(_ID_BYTES).hex()
    if keep:
        replace_file(own, f"{made}\n".encode("ascii"))
    return made
