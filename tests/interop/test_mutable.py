"""A little of ``mutable_matrix``: three servers, two of Tahoe-LAFS's and one of ours, small files."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from tests.interop import mutable_matrix


class MutableTests(mutable_matrix.MatrixTestCase):
    """Either writes, both read, over both protocols."""

    timeout = 1500
    kind = "few"
    sizes: tuple[int, ...] = (0,)
    large = 300_000
    encodings = ((2, 3, 3),)
    thinned = False

    def test_two_of_three(self) -> Deferred[None]:
        """One share on each server."""
        return Deferred.fromCoroutine(self.check_all())
