"""Many caps looked after as one pipeline, each object once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import attrs
from twisted.python.failure import Failure

from pipegrid.arguments import check_callable, shown
from pipegrid.core.caps import Cap, ChkCap, ChkVerifierCap, LitCap, MutableCap
from pipegrid.core.filecaps import keepable
from pipegrid.errors import CapError, UsageError
from pipegrid.transfer.upkeep.upkeep import Upkeep, UpkeepOutcome

Understood = ChkCap | ChkVerifierCap | LitCap | MutableCap


async def look_after(
    opening: Coroutine[Any, Any, Upkeep],
    caps: Sequence[str | Cap],
    ended: Callable[[int, Any], None] | None,
) -> list[Any]:
    """
    Return the outcomes of all caps, in their order.

    Caps of the same object, be it a read cap and its verify cap, are one object; those that differ in
    anything but that are two, also under one storage index, or else a wrong cap could stand in for a right
    one.

    Args:
        opening: what looks after them; it is closed in the end.
        ended: told of each number and outcome, in the order of ending.

    Raises:
        UsageError: that is no list, or nothing that can be called.
    """
    try:
        _check_list(caps)
        check_callable(ended, "ended")
    except UsageError:
        opening.close()
        raise
    outcomes: dict[int, UpkeepOutcome] = {}
    numbers: dict[object, list[tuple[int, Understood]]] = {}

    def note(number: int, outcome: UpkeepOutcome) -> None:
        outcomes[number] = outcome
        if ended is not None:
            ended(number, outcome)

    def told(key: object, outcome: UpkeepOutcome) -> None:
        for number, cap in numbers[key]:
            note(number, _of(outcome, cap))

    upkeep = await opening
    try:
        for number, given in enumerate(caps):
            cap = _understood(given)
            if isinstance(cap, Failure):
                note(number, cap)
                continue
            key = cap if isinstance(cap, LitCap) else cap.verifier()
            if key in numbers:
                numbers[key].append((number, cap))
                first = numbers[key][0][0]
                if first in outcomes:
                    numbers[key] = [numbers[key][0]]
                    note(number, _of(outcomes[first], cap))
                continue
            numbers[key] = [(number, cap)]
            await upkeep.room()
            upkeep.begin(cap, partial(told, key))
        await upkeep.finished()
    finally:
        await upkeep.close()
    return [outcomes[number] for number in range(len(caps))]


def _check_list(caps: object) -> None:
    if not isinstance(caps, Sequence) or isinstance(caps, (str, bytes)):
        raise UsageError(f"many objects are named by a list of caps, not {shown(caps)}")


def _understood(given: str | Cap) -> Understood | Failure:
    """Return a cap that can be looked after, or why it cannot."""
    try:
        return keepable(given)
    except CapError:
        failure = Failure()
        failure.cleanFailure()
        return failure


def _of(outcome: UpkeepOutcome, cap: Understood) -> UpkeepOutcome:
    """Return the same outcome of another cap of the object."""
    if isinstance(outcome, Failure) or outcome.cap == cap:
        return outcome
    return attrs.evolve(outcome, cap=cap)
