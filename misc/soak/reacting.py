"""How the soaks that need a reactor run as commands."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import react


def status_of(work: Callable[[Any], Coroutine[Any, Any, int]]) -> int:
    """Run a coroutine in the reactor; returns its status, or 1 if it did not get to its end."""
    statuses: list[int] = []

    async def play(reactor: Any) -> None:
        statuses.append(await work(reactor))

    with suppress(SystemExit):  # what react ends with; it has printed what was raised
        react(lambda reactor: Deferred.fromCoroutine(play(reactor)))
    return max(statuses, default=1)
