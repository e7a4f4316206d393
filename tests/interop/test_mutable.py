"""A little of ``mutable_matrix``: three servers, two of Tahoe-LAFS's and one of ours, small files."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from tests.interop import mutable_matrix


class MutableTests(mutable_matrix.TurnsTestCase):
    """Either writes, both read, over both protocols."""

    sizes: tuple[int, ...] = (0,)
    large = 300_000
    kinds = ("tahoe", "pipegrid", "tahoe")

    def test_two_of_three(self) -> Deferred[None]:
        """One share on each server."""
        return Deferred.fromCoroutine(self.take_turns((2, 3, 3)))
