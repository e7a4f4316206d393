"""What a schedule of faults may not leave behind, beside what ``leaks`` finds."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twisted.logger import LogLevel, globalLogPublisher


@contextmanager
def watched() -> Iterator[list[str]]:
    """
    Note every failure that is logged, or that Python can raise nowhere.

    At the end all is collected that the schedule has left, so that a failed Deferred of which nobody took the
    failure, or a coroutine that cannot be closed, is told of here and not in some later schedule.
    """
    logged: list[str] = []

    def observe(event: Any) -> None:
        failure = event.get("log_failure")
        if failure is not None or event.get("log_level") is LogLevel.critical:
            logged.append(str(failure.getTraceback() if failure is not None else event))

    def unraisable(what: Any) -> None:
        lines = traceback.format_exception(what.exc_type, what.exc_value, what.exc_traceback)
        logged.append(f"in {what.object!r}: " + "".join(lines))

    observer: Any = observe
    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    globalLogPublisher.addObserver(observer)
    gc.freeze()  # what was there before need not be looked through
    try:
        yield logged
        for _ in range(5):
            if not gc.collect():
                break  # else what was closed in this round may be garbage only now
    finally:
        gc.unfreeze()
        globalLogPublisher.removeObserver(observer)
        sys.unraisablehook = hook
