"""The machine is gone: what is left are the servers, and the line that ``backup`` printed."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from misc.soak.tree_world import TreeWorld, described, make_tree
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from pipegrid.core.encoding_parameters import Params


class DisasterTests(TestCase):
    """Real commands, and three real servers."""

    timeout = 110

    def test_everything_comes_back(self) -> Deferred[None]:
        """Names that are no text, modes, times, links and empty directories, of both runs."""

        async def work() -> None:
            scratch = Path(tempfile.mkdtemp(prefix="pg"))
            self.addCleanup(shutil.rmtree, scratch, True)
            world = TreeWorld(reactor, scratch, 3, Params(2, 3))
            self.addCleanup(world.stop)
            await world.start()
            source = scratch / "home"
            make_tree(source, random.Random(1), [0, 30, 500, 70_000, 1_500_000])
            (source / "odd").mkdir()
            with open(bytes(source) + b"/odd/caf\xe9", "wb") as file:
                file.write(b"x" * 100)
            first = described(source)
            backup = await world.run("backup", str(source))
            self.assertEqual(backup.status, 0, backup.err)
            (source / "d0/e0/f2").write_bytes(b"changed")
            (source / "d0/e0/f3").unlink()
            second = described(source)
            backup = await world.run("backup", str(source))
            catalogue = backup.out.strip()
            shutil.rmtree(source)
            shutil.rmtree(world.client)
            shutil.rmtree(scratch / "cache", ignore_errors=True)

            another = scratch / "another"
            world.make_client(another)
            back = scratch / "back"
            restored = await world.run("restore", catalogue, "-o", str(back), client=another)
            self.assertEqual(restored.status, 0, restored.err)
            self.assertEqual(described(back), second)
            runs = (await world.run("backups", catalogue, client=another)).out.splitlines()
            self.assertEqual(len(runs), 2)
            when = runs[0].split()[0]
            old = scratch / "old"
            arguments = ("restore", catalogue, when, "-o", str(old))
            restored = await world.run(*arguments, client=another)
            self.assertEqual(restored.status, 0, restored.err)
            self.assertEqual(described(old), first)

        return Deferred.fromCoroutine(work())
