"""Something comes into the place of a file or link: what was there goes only when it has come."""

from __future__ import annotations

import os
from contextlib import suppress

from pipegrid.disk.partname import part_path


def link_instead(to: str, name: str, inside: int) -> None:
    """
    Make a link in the place of what is there.

    Args:
        to: where it leads.
        name: of both, in the directory that is open as ``inside``.

    Raises:
        OSError: it cannot be made; what was there still is.
    """
    hidden = part_path(name, inside)
    try:
        os.symlink(to, hidden, dir_fd=inside)
    except FileExistsError:  # left by a process that was killed
        os.unlink(hidden, dir_fd=inside)
        os.symlink(to, hidden, dir_fd=inside)
    try:
        os.replace(hidden, name, src_dir_fd=inside, dst_dir_fd=inside)
    except BaseException:
        with suppress(OSError):
            os.unlink(hidden, dir_fd=inside)
        raise


def directory_instead(mode: int, name: str, inside: int) -> None:
    """
    Make a directory in the place of a file or link; arguments and errors as of ``link_instead``.

    No directory takes a file's name from it, so the file steps aside: a process that is killed before the
    directory is there leaves it beside, under the name that a part of it would have.
    """
    hidden = part_path(name, inside)
    os.replace(name, hidden, src_dir_fd=inside, dst_dir_fd=inside)
    try:
        os.mkdir(name, mode, dir_fd=inside)
    except BaseException:
        os.replace(hidden, name, src_dir_fd=inside, dst_dir_fd=inside)
        raise
    os.unlink(hidden, dir_fd=inside)
