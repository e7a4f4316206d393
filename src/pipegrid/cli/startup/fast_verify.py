"""
``mirror verify`` where nothing has changed: what it finds and says is over before the rest could be loaded.

The rest is what does all else: ``mirror_verify``, ``console``, ``process``. What is not as it should
be is for that to find out, and to say.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # ``signal`` makes enumerations, for two milliseconds
import os
import sys

from pipegrid.cli.startup.fast_json import plain_json

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from typing import Any

    from pipegrid.mirror.quick_check import QuickCheckResult

MAX_DEST = 1000
"""Letters of a path that are printed together with the rest, or not at all."""


def verify_if_same(dest: str, as_json: bool, quiet: bool) -> int | QuickCheckResult | None:
    """
    Say that all of a mirror is there and right, and return the exit status.

    Returns:
        Else nothing was said, and there is more to be found out, beyond what was seen at a glance; None:
        nothing was seen, or somebody watches how far it is.
    """
    from pipegrid.mirror.quick_check import glimpse

    if sys.stdout is None or sys.stderr is None or not (quiet or not sys.stderr.isatty()):
        return None
    if len(dest) > MAX_DEST or (as_json and plain_json({"dest": dest}) is None):
        return None
    for number in (_signal.SIGTERM, _signal.SIGHUP):  # as ``process`` has it
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
    except OSError:  # which ``console`` has a sentence for, or waits until there is room
        return found
    return 0


def verified(
    dest: str, files: int, size_bytes: int, right: int, wrong: int, unnoted: int
) -> tuple[str, dict[str, Any]]:
    """Return what ``verify`` says of its result, for people and in JSON."""
    return f"{right} of {files} files exist and are right", {
        "dest": dest,
        "files": files,
        "bytes": size_bytes,
        "right": right,
        "wrong": wrong,
        "unnoted": unnoted,
    }
