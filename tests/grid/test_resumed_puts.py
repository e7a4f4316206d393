"""A put on an embedded grid that was cut off: the next one writes only what is missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import TestCase

from pipegrid import Grid
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import Buffer
from pipegrid.grid.client_creation import create_local
from pipegrid.transfer.results import PutResult
from pipegrid.transport.local_server import LocalServer
from pipegrid.wire.storage_messages import WriteAnswer

clock: Any = installed_reactor

SIZE = 30_000_000
BLOCK = (1 << 20) // 3 + 1
WINDOW = 1 << 20


class EmbeddedTests(TestCase):
    """Real threads and real files, in process."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        create_local(self.directory, params=Params(3, 4), happy=4, servers=4, durability="none")
        self.path = Path(self.mktemp())
        self.path.write_bytes(os.urandom(SIZE))
        self.written = 0
        write = LocalServer.write

        def counting(
            server: LocalServer,
            index: bytes,
            number: int,
            at: int,
            data: Sequence[Buffer],
            *a: Any,
            **k: Any,
        ) -> Deferred[WriteAnswer]:
            self.written += sum(map(len, data))
            return write(server, index, number, at, data, *a, **k)

        self.patch(LocalServer, "write", counting)

    async def open(self) -> Grid:
        return await Grid.open(clock, self.directory, window_bytes=WINDOW)

    async def cut(self, **options: Any) -> int:
        """Put the file until 54 % are acknowledged, in a grid of its own; return what is missing then."""
        grid = await self.open()
        done = 0

        def progress(now: int, total: int) -> None:
            nonlocal done
            if now >= 0.54 * total > done:
                clock.callLater(0, started.cancel)  # from within a put nothing can be cancelled
            done = now

        started: Deferred[PutResult] = grid.put(self.path, progress=progress, **options)
        try:
            await started
        except CancelledError:
            pass
        else:
            self.fail("it was not cut off")
        await grid.close()
        self.written = 0
        return SIZE * 4 // 3 - done

    async def rerun(self, **options: Any) -> list[tuple[int, int]]:
        grid = await self.open()
        told: list[tuple[int, int]] = []
        result = await grid.put(self.path, progress=lambda *now: told.append(now), **options)
        self.assertEqual(result.happiness, 4)
        self.assertEqual(await grid.read(result.cap), self.path.read_bytes())
        await grid.close()
        return told

    async def test_it_goes_on(self) -> None:
        """With a key of the content, and with a random one; progress begins with what is there."""
        for random_key in (False, True):
            self.path.write_bytes(os.urandom(SIZE))
            missing = await self.cut(random_key=random_key)
            told = await self.rerun(random_key=random_key)
            self.assertLessEqual(self.written, missing + 4 * (WINDOW + 2 * BLOCK))
            self.assertLess(self.written, SIZE)
            self.assertEqual(told[-1][0], told[-1][1])
            self.assertEqual(list(self.directory.glob("private/unfinished/*")), [])
