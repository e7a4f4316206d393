"""Whole trees of large files take no more memory than a part of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

from misc.soak import large_tree
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase


class LargeTreeTests(TestCase):
    """``misc/soak/large_tree.py``, which does it with 30 GB."""

    timeout = 110

    def test_small(self) -> Deferred[None]:
        """Twenty files of 4 MB: all are stored, ten thirds of their bytes, and memory stays flat."""

        async def work() -> None:
            out = io.StringIO()
            root = Path(self.mktemp())
            root.mkdir()
            status = await large_tree.run(reactor, root, 20, 4_000_000, out)
            said = [json.loads(line) for line in out.getvalue().splitlines()]
            self.assertEqual((said[-1]["files"], said[-1]["left_out"]), (20, []))
            self.assertGreater(said[-1]["share_bytes"], 20 * 4_000_000 * 10 // 3)
            self.assertEqual(status, 0, out.getvalue())

        return Deferred.fromCoroutine(work())
