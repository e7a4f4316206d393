"""
A put that did not end in one move, as whoever goes on with it takes it over.

What was sent is not sent again: of each server that has not answered as hoped there is a call, made by
``WholePut`` in one piece, which is the question for room and all writes at once. It is taken apart here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.transfer.peers import Peer
from pipegrid.wire.messages import Allocation, Stored, WriteAnswer


@attrs.frozen(eq=False)
class Begun:
    """
    A put that did not end in one move.

    Attributes:
        started: when it began, by the clock.
        happy_since: when enough was stored, if it was.
        stored: shares that this put has stored, each with its server.
        found: shares that servers had before.
        calls: of each other server the shares that it was sent, and what comes, or came, of it.
    """

    started: float
    happy_since: float | None
    stored: Mapping[int, Peer]
    found: Mapping[Peer, frozenset[int]]
    calls: Mapping[Peer, tuple[Sequence[int], Deferred[Stored]]]


def take_apart(
    call: Deferred[Stored], numbers: Sequence[int]
) -> tuple[Deferred[Allocation], dict[int, Deferred[WriteAnswer]]]:
    """
    Return the outcome of a call as those of an allocation and of writes.

    The call is cancelled when all of them have been.
    """
    left = len(numbers) + 1

    def cancelled(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            call.cancel()

    allocation: Deferred[Allocation] = Deferred(cancelled)
    writes: dict[int, Deferred[WriteAnswer]] = {number: Deferred(cancelled) for number in numbers}

    def told(result: Stored | Failure) -> None:
        if isinstance(result, Failure):
            pass_on(allocation, result)
            for write in writes.values():
                pass_on(write, result)
            return
        pass_on(allocation, result.allocation)
        for number, write in writes.items():
            error = result.failed.get(number)
            pass_on(write, WriteAnswer(True) if error is None else Failure(error))

    call.addBoth(told)
    return allocation, writes


def pass_on(waiting: Deferred[Any], result: Any) -> None:
    """Fire with a result or a failure, unless whoever waits has cancelled."""
    if not waiting.called:
        if isinstance(result, Failure):
            waiting.errback(result)
        else:
            waiting.callback(result)
