"""
The whole matrix: sizes, encodings, keys, protocols, in both directions, on ten of Tahoe-LAFS's storage nodes.

``make interop`` runs it, in some ten minutes; ``test_tahoe`` is a small piece of it.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from random import Random
from unittest import mock

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from tests.interop.matrix import LARGE_SIZES, SIZES, Pair, with_pair
from tests.interop.processes import TahoeGrid

ENCODINGS = ((1, 1, 1), (3, 10, 10), (7, 10, 10), (10, 10, 10))
"""Needed, happy, total. Happiness is that of all shares, so that neither side leaves one out."""


class MatrixTests(TestCase):
    """Ten servers; for every encoding and protocol a gateway, one after the other."""

    timeout = 1500

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        cache = mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(self.root / "cache")})
        cache.start()
        self.addCleanup(cache.stop)
        self.tahoe = TahoeGrid(self.root, 10)
        self.addCleanup(self.tahoe.stop)

    def test_all_of_it(self) -> Deferred[None]:
        """Same bytes, same caps, same shares, same health."""
        return Deferred.fromCoroutine(self._all_of_it())

    async def _all_of_it(self) -> None:
        for shares in ENCODINGS:
            for force_foolscap in (False, True):
                needed, _, total = shares
                name = f"{needed}-of-{total}-{'foolscap' if force_foolscap else 'https'}"
                started_s = time.monotonic()
                await with_pair(
                    self,
                    reactor,
                    self.tahoe,
                    self.root / name,
                    shares,
                    force_foolscap,
                    partial(self._sizes, name),
                )
                print(
                    f"\n  {name}: alike ({time.monotonic() - started_s:.0f} s) ", end="", flush=True
                )

    async def _sizes(self, name: str, pair: Pair) -> None:
        for size in (*SIZES, *LARGE_SIZES):
            seed = f"{name}, {size} bytes"
            try:
                await pair.assert_alike(size, Random(seed))
            except Exception as error:
                raise self.failureException(f"{seed}: {error}") from error
        await pair.assert_damage_is_seen(Random(name))
        await pair.assert_repaired(Random(name))
