"""``--limit-rate``, as users type it: real commands and servers, every byte between them counted."""

from __future__ import annotations

import random
import re
import shutil
import tempfile
from pathlib import Path

from misc.soak.tree_world import Ended, TreeWorld, described, make_tree
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from pipegrid.core.encoding_parameters import Params

RATE = 200_000
SIZES = [200] * 10 + [100_000] * 3
MORE_BYTES = 350_000
FREE_BYTES = RATE
"""More than what may pass at once, which is a quarter of a second's."""


class LimitRateTests(TestCase):
    """Two servers that could do much more. Times are bounded from below: the machine may be slow."""

    timeout = 110

    def setUp(self) -> Deferred[None]:  # type: ignore[override]
        self.scratch = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(shutil.rmtree, self.scratch, True)
        self.world = TreeWorld(reactor, self.scratch, 2, Params(1, 2))
        self.addCleanup(self.world.stop)
        self.source = self.scratch / "source"
        make_tree(self.source, random.Random(1), SIZES)
        return Deferred.fromCoroutine(self.world.start())

    async def limited(self, *arguments: str, received: int = 0) -> Ended:
        """
        Run a command at the rate; it succeeds, and takes as long as its bytes do.

        Args:
            received: the bytes that it must have read to succeed. More than these may have reached the
                buffers of its sockets when it ends, unread.
        """
        ended = await self.world.run(arguments[0], "--limit-rate", f"{RATE}", *arguments[1:])
        self.assertEqual(ended.status, 0, ended.err)
        self.assertGreater(ended.down, received)
        passed = max(ended.up, received)
        self.assertGreater(passed, 1.5 * FREE_BYTES, arguments)
        self.assertGreater(ended.seconds, (passed - FREE_BYTES) / RATE, arguments)
        return ended

    def test_trees_and_files(self) -> Deferred[None]:
        """Up and down, over HTTPS and over Foolscap; what comes back is what was there."""

        async def work() -> None:
            cap = (await self.limited("put", "-r", str(self.source))).out.strip()
            got = str(self.scratch / "got")
            await self.limited("get", "-r", cap, "-o", got, received=sum(SIZES))
            self.assertEqual(described(self.scratch / "got"), described(self.source))
            (self.source / "more").write_bytes(random.Random(2).randbytes(MORE_BYTES))
            catalogue = (await self.limited("backup", str(self.source))).out.strip()
            back, size = str(self.scratch / "back"), sum(SIZES) + MORE_BYTES
            await self.limited("restore", catalogue, "-o", back, received=size)
            self.assertEqual(described(self.scratch / "back"), described(self.source))

        return Deferred.fromCoroutine(work())

    def test_foolscap(self) -> Deferred[None]:
        """Foolscap starts TLS in the middle of a connection; its bytes count all the same."""

        async def work() -> None:
            self.world.make_client(self.world.client.with_name("old"), foolscap=True)
            self.world.client = self.world.client.with_name("old")
            file = self.scratch / "file"
            size = 400_000
            file.write_bytes(random.Random(3).randbytes(size))
            ended = await self.limited("put", str(file))
            self.assertNotIn("Foolscap", ended.err)
            cap, back = ended.out.strip(), str(self.scratch / "back")
            await self.limited("get", cap, "-o", back, received=size)
            self.assertEqual((self.scratch / "back").read_bytes(), file.read_bytes())

        return Deferred.fromCoroutine(work())

    def test_an_embedded_grid(self) -> Deferred[None]:
        """Nothing goes over a network: it says so, and goes on."""

        async def work() -> None:
            client = self.scratch / "embedded"
            made = await self.world.run("-q", "init", client=client)
            self.assertEqual(made.status, 0, made.err)
            file = str(self.source / "d0/e0/f0")
            ended = await self.world.run("put", "--limit-rate", "1kB", file, client=client)
            self.assertEqual(ended.status, 0, ended.err)
            self.assertEqual(len(re.findall("sends nothing over a network", ended.err)), 1)

        return Deferred.fromCoroutine(work())
