"""Trees that Tahoe-LAFS has stored, stored again byte for byte: see ``tests/vectors/README.md``."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, parse_cap
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.packed_directory import (
    PackedChild,
    directory_cap,
    pack_immutable,
    unpack_immutable,
)
from pipegrid.tree.tree_plan import DirectoryNode, TreePlan
from tests.simulation.grid_world import GridWorld
from tests.vectors import load

TREES: dict[str, Any] = load("trees")


class VectorTests(SynchronousTestCase):
    """The same bytes, and so the same caps."""

    def setUp(self) -> None:
        self.world = GridWorld()
        self.addCleanup(self.world.close)

    def store(self, packed: bytes, k: int, n: int) -> Cap:
        """Store a directory as the recorded node did; return its cap."""
        grid = self.world.client().grid
        params = Params(k, n, TREES["max_segment_size"])
        secret = bytes.fromhex(TREES["convergence_hex"])
        known: list[ChkCap] = []
        happy = min(k, n)

        def put() -> Deferred[Any]:
            return grid.put(
                packed, params=params, happy=happy, convergence=secret, cap_known=known.append
            )

        cap = self.world.run(put()).cap
        if isinstance(cap, ChkCap):
            self.assertEqual(known, [cap])  # what is told early is what it becomes
        return directory_cap(cap)

    def test_directories(self) -> None:
        """Packed from their children, whatever their names and metadata are."""
        for recorded in TREES["immutable_directories"]:
            packed = bytes.fromhex(recorded["packed_hex"])
            children = unpack_immutable(packed)
            if (
                "nocap" not in recorded["given_children"]
            ):  # readers drop it, and we write no such entry
                self.assertEqual(pack_immutable(reversed(children)), packed, recorded["name"])
            cap = self.store(packed, recorded["k"], recorded["n"])
            self.assertEqual(str(cap), recorded["dircap"], recorded["name"])

    def test_a_backup(self) -> None:
        """The plan makes of its files, with the metadata that it gave them, the directories that it made."""
        backup = TREES["backup"]
        recorded = {tuple(each["path"]): each for each in backup["tree"]}
        plan = TreePlan()
        directories: dict[tuple[str, ...], DirectoryNode] = {(): plan.enter(None, "", {})}
        packed: dict[tuple[str, ...], list[PackedChild]] = {
            path: unpack_immutable(bytes.fromhex(each["packed_hex"]))
            for path, each in recorded.items()
            if each["type"] == "dirnode"
        }
        ahead: list[tuple[str, ...]] = [()]
        while ahead:
            path = ahead.pop()
            for child in packed[path]:
                below = (*path, child.name)
                if isinstance(child.cap, DirectoryCap):
                    directories[below] = plan.enter(directories[path], child.name, child.metadata)
                    ahead.append(below)
                else:
                    plan.stored(
                        plan.expect(directories[path], child.name, child.metadata), child.cap
                    )
            plan.leave(directories[path])
        paths = {directory: path for path, directory in directories.items()}
        while (ready := plan.take_ready()) is not None:
            directory, children = ready
            data = pack_immutable(children)
            expected = recorded[paths[directory]]
            self.assertEqual(data.hex(), expected["packed_hex"])
            cap = self.store(data, backup["k"], backup["n"])
            self.assertEqual(str(cap), expected["cap"])
            plan.stored(directory, cap)
        self.assertEqual(plan.root_cap, parse_cap(recorded[()]["cap"]))
