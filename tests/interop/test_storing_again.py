"""Storing again what Tahoe-LAFS has stored, in small; the whole is in ``storing_again``."""

from __future__ import annotations

from misc.speedtest.peers.nodes import HTTPS
from twisted.internet.defer import Deferred

from pipegrid.core.encoding_parameters import Params
from tests.interop.storing_again import StoringAgain


class SmallTests(StoringAgain):
    """Four servers."""

    def test_https(self) -> Deferred[None]:
        """A few files: from the second on no share is stored twice."""
        sizes = (500, 200_000, 1_500_000)
        return Deferred.fromCoroutine(self.check_all(4, Params(2, 4), 3, sizes, 3, HTTPS))
