"""Running a simulation: to the end of an operation, to a limit, or to the finding that it hangs."""

from __future__ import annotations

from typing import TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from pipegrid.simulation.clock import HeapClock
from pipegrid.simulation.network import SimulatedNetwork

T = TypeVar("T")

_SHOWN = 20
_STANDSTILL = 100_000


class Hung(AssertionError):
    """The operation did not end; the text lists what is pending."""


def run(
    clock: Clock,
    deferred: Deferred[T],
    limit_s: float = 3600.0,
    network: SimulatedNetwork | None = None,
) -> T:
    """
    Let time pass from one scheduled call to the next until ``deferred`` fires.

    Args:
        limit_s: of virtual time, from now.
        network: to be described if the operation hangs.

    Returns:
        The result; if that is a failure, its exception is raised.

    Raises:
        Hung: the limit came first, or nothing is scheduled at all, or calls without delay follow one
            another for ever.
    """
    results: list[T | Failure] = []
    deferred.addBoth(results.append)
    end_s = clock.seconds() + limit_s
    calls, since_s = 0, clock.seconds()
    while not results:
        next_s = _next_time(clock)
        if next_s is None:
            raise Hung(_report("nothing is scheduled that could end it", clock, network))
        if next_s > end_s:
            raise Hung(_report(f"not done after {limit_s:g} s", clock, network))
        if isinstance(clock, HeapClock):
            clock.step()
        else:
            clock.advance(max(0.0, next_s - clock.seconds()))
        calls += 1
        if clock.seconds() > since_s:
            calls, since_s = 0, clock.seconds()
        elif calls > _STANDSTILL:
            raise Hung(_report(f"{calls} calls in no time", clock, network))
    if isinstance(results[0], Failure):
        results[0].raiseException()
    return results[0]


def _next_time(clock: Clock) -> float | None:
    if isinstance(clock, HeapClock):
        return clock.next_time()
    return min((call.getTime() for call in clock.getDelayedCalls()), default=None)


def _report(finding: str, clock: Clock, network: SimulatedNetwork | None) -> str:
    lines = [f"Hung at {clock.seconds():.9f} s: {finding}. Pending:"]
    pending = [repr(call) for call in clock.getDelayedCalls()]
    if network is not None:
        pending = network.describe() + pending
    lines += pending[:_SHOWN] or ["nothing"]
    if len(pending) > _SHOWN:
        lines.append(f"and {len(pending) - _SHOWN} more")
    return "\n  ".join(lines)


def leaks(clock: Clock, network: SimulatedNetwork) -> list[str]:
    """
    List what a finished operation left behind: connections that some program still holds, and timers.

    A connection that was just closed is still held at the far end: let some time pass before.
    """
    found = [repr(connecting) for connecting in network.connecting]
    found += [repr(transport) for transport in network.transports]
    found += [repr(call) for call in clock.getDelayedCalls() if not network.owns(call)]
    return found
