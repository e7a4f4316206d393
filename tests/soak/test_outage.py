"""The soak of servers that go away in the middle of a tree runs."""

from __future__ import annotations

import io

from misc.soak import outage
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase


class OutageSoakTests(TestCase):
    """``misc/soak/outage.py``; by itself it does it for longer than a minute."""

    timeout = 110

    def test_a_short_one(self) -> Deferred[None]:
        """A backup, and a get, are whole in spite of it."""

        async def work() -> None:
            out = io.StringIO()
            status = await outage.run(reactor, ("backup", "get"), 1.0, 20, 5, out)
            self.assertEqual(status, 0, out.getvalue())
            self.assertIn("     0 promises broken", out.getvalue())

        return Deferred.fromCoroutine(work())
