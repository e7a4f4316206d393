"""Calling ``Slots`` without blocking the reactor, and in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from twisted.internet.defer import Deferred

from pipegrid.storage.durability import Durability

P = ParamSpec("P")
T = TypeVar("T")


class SlotQueue:
    """
    Runs what concerns one slot one after the other, in the order of the calls.

    Both protocols' faces share one, since who writes over one may read over the other.

    Attributes:
        durable: whether the policy wants what was written synced; hand it on to ``Slots``.
    """

    durable: bool

    def __init__(self, durability: Durability) -> None:
        raise NotImplementedError

    def write(
        self, storage_index: bytes, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Call a function that syncs, in a thread if it has to; fires with what it returns."""
        raise NotImplementedError

    def read(
        self, storage_index: bytes, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Call a function that only reads, here; at once unless writes to this slot are under way."""
        raise NotImplementedError
