"""Puts of real processes that are cut off and run again; ``make soak`` and ``make interop`` in small."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from misc.soak import resume
from misc.soak.kill_put import Violation
from misc.soak.resume import PIPEGRID, WINDOW_BYTES, Round, Servers
from misc.speedtest.peers.nodes import FOOLSCAP, HTTPS
from twisted.trial.unittest import SynchronousTestCase

SERVERS = 3
SIZE = 20_000_000


class ResumeTests(SynchronousTestCase):
    """``misc/soak/resume.py``, on servers of ours."""

    def test_only_what_is_missing_is_sent(self) -> None:
        """
        After SIGINT, and after SIGKILL with a random key while a server was restarted.

        Over Foolscap it cannot be, and whoever interrupts a put is told so. And it is noticed if a
        server is sent more than is promised.
        """
        scratch = Path(self.mktemp()).resolve()
        scratch.mkdir()
        servers = Servers(PIPEGRID, SERVERS, scratch)
        self.addCleanup(servers.close)
        rng = random.Random(16)
        for what in (
            Round(PIPEGRID, signal.SIGINT, restart=False),
            Round(PIPEGRID, signal.SIGKILL, restart=True, random_key=True),
        ):
            found = resume.play(servers, what, SIZE, rng)
            self.assertLess(found.missing, 0.6 * found.whole)
            self.assertLess(found.sent, found.missing + SERVERS * WINDOW_BYTES + 0.02 * SIZE)
        servers.speak(FOOLSCAP)
        status, _, said = servers.put(servers.client / "file", False, signal.SIGINT)
        self.assertEqual(status, 130)
        self.assertIn("an interrupted put starts again on 3 of 3 servers", said)
        self.assertIn("they use Foolscap", said)
        servers.speak(HTTPS)
        self.patch(resume, "WINDOW_BYTES", -SIZE)
        with self.assertRaises(Violation) as caught:
            resume.play(servers, Round(PIPEGRID, signal.SIGINT, restart=False), SIZE // 3, rng)
        self.assertIn("bytes too many", str(caught.exception))
