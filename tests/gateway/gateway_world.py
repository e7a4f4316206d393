"""A grid of ten servers in virtual time, for the parts of a gateway."""

from __future__ import annotations

import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.core.caps import Cap, DirectoryCap
from pipegrid.gateway.web_api.check_json import storage_index_text
from pipegrid.tree.tree_grid import Grid
from tests.transport.gbs_world import GbsWorld, make_grid

T = TypeVar("T")

CHK_DATA = b"fifty-six bytes of text are the smallest CHK file: 56..."


class GatewayTestCase(SynchronousTestCase):
    """Has ten servers and a grid of them."""

    def setUp(self) -> None:
        self.world = GbsWorld(Path(self.mktemp()), 10, latency_s=0.01)
        self.addCleanup(self.world.close)
        files = make_grid(self.world)
        self.grid = Grid(
            self.world.client.clock, files.config, files._peers, files._workers, limits=None
        )
        self.addCleanup(lambda: self.world.run(self.grid.close()))

    def run_now(self, work: Coroutine[Any, Any, T]) -> T:
        """Let time pass until a coroutine has ended."""
        return self.world.run(Deferred.fromCoroutine(work))

    def put(self, data: bytes) -> Cap:
        """Store an immutable file."""
        return self.world.run(self.grid.put(data)).cap

    def make_directory(self, **children: Cap) -> DirectoryCap:
        """Store a mutable directory with these children."""
        directory = self.world.run(self.grid.create_directory())
        for name, cap in children.items():
            self.world.run(directory.link(name, cap))
        return directory.cap

    def delete_shares(self, cap: Cap, keep: int = 0) -> None:
        """Delete all shares of an object but the ``keep`` with the lowest numbers."""
        index = base32.decode(storage_index_text(cap))
        for server in self.world.servers:
            place = Path(server.store._paths.directory(index))
            for share in place.iterdir() if place.is_dir() else ():
                if int(share.name) >= keep:
                    share.unlink()
            if place.is_dir() and not list(place.iterdir()):
                shutil.rmtree(place)
