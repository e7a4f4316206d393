"""
Beside Tahoe-LAFS itself: an introducer, three storage nodes, a gateway. The whole is in ``tahoe_matrix``.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from unittest import mock

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from tests.interop.matrix import Pair, with_pair
from tests.interop.processes import TahoeGrid

SHARES = (2, 3, 3)
FILES = 300
"""Small ones, so many that their leases go over Foolscap where there is both."""

SIZES = (0, 55, 56, 1000, 131073, (1 << 20) + 1)


class TahoeTests(TestCase):
    """They take their seconds to start, so one test does all with them."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        cache = mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(self.root / "cache")})
        cache.start()
        self.addCleanup(cache.stop)
        self.tahoe = TahoeGrid(self.root, 3)
        self.addCleanup(self.tahoe.stop)

    def test_files_are_alike(self) -> Deferred[None]:
        """Over both protocols: the same bytes, caps, shares and health, whoever puts, gets and verifies."""
        return Deferred.fromCoroutine(self._both_protocols())

    async def _both_protocols(self) -> None:
        for force_foolscap in (False, True):
            root = self.root / str(force_foolscap)
            await with_pair(self, reactor, self.tahoe, root, SHARES, force_foolscap, self._sizes)
            leased = FILES * len(self.tahoe.servers)
            # Over HTTPS the first ones go before it is known that they are many.
            least = leased if force_foolscap else leased // 3
            self.assertTrue(least <= self.calls <= leased, f"{self.calls} of {leased} leases")

    async def _sizes(self, pair: Pair) -> None:
        for size in SIZES:
            await pair.assert_alike(size, Random(size))
        await pair.assert_damage_is_seen(Random(7))
        await pair.assert_repaired(Random(7))
        self.calls = await pair.assert_a_crowd_is_leased(Random(7), FILES)
