"""
``mirror verify`` for an unchanged mirror, which ends before the usual modules are loaded.

If anything is not as expected, ``mirror_verify``, ``console`` and ``process`` do the work and report the
problem.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # ``signal`` makes enumerations, for two milliseconds
import os
import sys

from pipegrid.cli.startup.fast_json_encoder import plain_json

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow
if TYPE_CHECKING:
    from typing import Any

    from pipegrid.mirror.stat_cache import QuickCheckResult

MAX_DEST = 1000
"""Maximum number of characters in a path that this module prints."""


def verify_if_same(dest: str, as_json: bool, quiet: bool) -> int | QuickCheckResult | None:
    """
    Check whether all files of a mirror are unchanged; if so, report that.

    Returns:
        The exit status after a report or an interruption. Otherwise the result of the quick check, or None if
            the check was not possible or a progress bar is wanted.
    """
    from pipegrid.mirror.stat_cache import glimpse

    if sys.stdout is None or sys.stderr is None or not (quiet or not sys.stderr.isatty()):
        return None
    if len(dest) > MAX_DEST or (as_json and plain_json({"dest": dest}) is None):
        return None
    for number in (_signal.SIGTERM, _signal.SIGHUP):  # SIGINT is handled so anyway
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _signal.default_int_handler)
    try:
        found = glimpse(dest, (os.cpu_count() or 1) > 1)
    except KeyboardInterrupt:
        from pipegrid.cli.console import Console
        from pipegrid.cli.error_report import Interrupted

        return Console(None, None, sys.stderr).complain(Interrupted())
    if found is None or found.others:
        return found
    text, fields = verified(dest, found.files, found.size_bytes, found.files, 0, 0)
    line = plain_json(fields) if as_json else f"{text}\n".encode("ascii")
    assert line is not None
    try:
        while line:
            line = line[os.write(1, line) :]
    except OSError:  # ``console`` writes again: it waits, or reports the error
        return found
    return 0


def verified(
    dest: str, files: int, size_bytes: int, right: int, wrong: int, unnoted: int
) -> tuple[str, dict[str, Any]]:
    """Return the report of ``verify`` for people, and its JSON fields."""
    return f"{right} of {files} files exist and are right", {
        "dest": dest,
        "files": files,
        "bytes": size_bytes,
        "right": right,
        "wrong": wrong,
        "unnoted": unnoted,
    }
