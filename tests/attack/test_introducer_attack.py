"""A flood of announcements at an introducer, in small."""

from __future__ import annotations

from pathlib import Path

from misc.attack.introducer import attack, broken
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase


class IntroducerAttackTests(TestCase):
    """A few hundred of the announcements that ``python -m misc.attack.introducer`` sends."""

    timeout = 120

    def test_a_flood(self) -> Deferred[None]:
        """Known servers stay listed, a new one is listed, and nothing grows."""
        return Deferred.fromCoroutine(self._flood())

    async def _flood(self) -> None:
        root = Path(self.mktemp()).absolute()
        root.mkdir()
        found = await attack(reactor, root, 300, 5)
        self.assertEqual(broken(found), [], found)
        self.assertEqual(sum(found["answers"].values()), 300)
