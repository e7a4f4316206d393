"""Checks of one object and of trees, as the web API gives them."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.core.caps import Cap, DirectoryCap, LitCap, UnknownCap
from pipegrid.errors import NotEnoughSharesError
from pipegrid.gateway.http_response import ResponseStream
from pipegrid.gateway.web_api.deep_operations import (
    OPERATIONS,
    DeepOperation,
    check_one,
    object_json,
    stream_deep_check,
    stream_manifest,
)
from pipegrid.gateway.web_ui.check_page import object_check_page, operation_page
from pipegrid.transfer.upkeep import UpkeepRequest
from tests.gateway.gateway_world import CHK_DATA, GatewayTestCase

CHECK, REPAIR = UpkeepRequest(), UpkeepRequest(repair=True)


class Lines(ResponseStream):
    """Keeps the lines of a stream; a reader that stops reading after ``takes`` of them."""

    def __init__(self, takes: int | None = None) -> None:
        super().__init__(None)
        self.lines: list[bytes] = []
        self.takes = takes
        self.waiting: list[Deferred[None]] = []

    def write(self, data: bytes) -> None:
        self.lines.append(data)

    async def ready(self) -> None:
        if self.takes is not None and len(self.lines) >= self.takes:
            self.waiting.append(Deferred())
            await self.waiting[-1]

    def objects(self) -> dict[str, Any]:
        """Return what is said of each object, by its path."""
        read = [json.loads(line) for line in self.lines if not line.startswith(b"ERROR:")]
        return {"/".join(one["path"]): one for one in read if one["type"] != "stats"}

    def stats(self) -> Any:
        read = [json.loads(line) for line in self.lines if not line.startswith(b"ERROR:")]
        return read[-1]["stats"]

    def errors(self) -> list[str]:
        """Return the lines of errors, which come last."""
        found = [line.decode() for line in self.lines if line.startswith(b"ERROR:")]
        return [line for line in found if self.lines.index(line.encode()) >= len(self.lines) - 5]


class CheckTests(GatewayTestCase):
    """One object."""

    def check(self, cap: Cap, **todo: bool) -> Any:
        return self.run_now(check_one(self.grid, cap, UpkeepRequest(**todo)))

    def test_healthy_file(self) -> None:
        """All that a client of Tahoe-LAFS reads is there, with servers by their ids."""
        cap = self.put(CHK_DATA)
        for todo in ({}, {"verify": True}, {"add_lease": True}):
            said = self.check(cap, **todo)
            results = said["results"]
            self.assertEqual(said["summary"], "Healthy")
            self.assertEqual(results["count-shares-good"], 10)
            self.assertEqual(results["count-good-share-hosts"], 10)
            self.assertEqual(results["servers-responding"], sorted(f"s{n}" for n in range(10)))
            self.assertEqual(sorted(results["sharemap"]), sorted(str(n) for n in range(10)))
            self.assertEqual(results["count-recoverable-versions"], 1)
            self.assertTrue(results["healthy"] and results["recoverable"])

    def test_repair_of_a_healthy_file(self) -> None:
        """Nothing is tried, and the results after are those before."""
        said = self.check(self.put(CHK_DATA), repair=True)
        self.assertFalse(said["repair-attempted"] or said["repair-successful"])
        self.assertEqual(said["pre-repair-results"], said["post-repair-results"])

    def test_damaged_file(self) -> None:
        cap = self.put(CHK_DATA)
        self.delete_shares(cap, keep=4)
        said = self.check(cap)
        self.assertEqual(said["summary"], "Not Healthy: 4 shares (enc 3-of-10)")
        self.assertEqual(said["results"]["count-happiness"], 4)
        repaired = self.check(cap, repair=True)
        self.assertTrue(repaired["repair-attempted"] and repaired["repair-successful"])
        self.assertEqual(repaired["pre-repair-results"], said)
        self.assertEqual(repaired["post-repair-results"]["summary"], "healthy")
        self.assertEqual(repaired["post-repair-results"]["results"]["count-shares-good"], 10)

    def test_lost_file(self) -> None:
        """A check says so; a repair fails as a read would."""
        cap = self.put(CHK_DATA)
        self.delete_shares(cap, keep=2)
        results = self.check(cap)["results"]
        self.assertEqual(
            (results["count-recoverable-versions"], results["count-unrecoverable-versions"]), (0, 1)
        )
        page = object_check_page(b"/uri/x", False, self.check(cap)).data
        self.assertIn(b"cannot be restored", page)
        with self.assertRaises(NotEnoughSharesError) as raised:
            self.check(cap, repair=True)
        self.assertEqual(raised.exception.found, 2)

    def test_literal_file(self) -> None:
        """It has no shares; with repair the fields that ``tahoe check --repair`` reads are there."""
        healthy = {"storage-index": "", "results": {"healthy": True}}
        self.assertEqual(self.check(LitCap(b"hello")), healthy)
        said = self.check(LitCap(b"hello"), repair=True)
        self.assertFalse(said["repair-attempted"] or said["repair-successful"])
        results = said["pre-repair-results"]["results"]
        self.assertTrue(results["healthy"])
        self.assertEqual((results["count-shares-good"], results["count-wrong-shares"]), (0, 0))

    def test_mutable_file(self) -> None:
        """Shares carry their version; a repair makes all of them again."""
        cap = self.world.run(self.grid.create_mutable(b"first")).cap
        self.delete_shares(cap, keep=8)
        said = self.check(cap)
        self.assertEqual(said["summary"], "Unhealthy: 8 shares (enc 3-of-10)")
        self.assertRegex(min(said["results"]["sharemap"]), r"^seq1-[a-z2-7]{4}-sh0$")
        repaired = self.check(cap, repair=True)
        self.assertTrue(repaired["repair-successful"])
        after = repaired["post-repair-results"]
        self.assertEqual(after["summary"], "Healthy")
        self.assertRegex(min(after["results"]["sharemap"]), r"^seq2-[a-z2-7]{4}-sh0$")

    def test_read_cap_of_a_mutable_file(self) -> None:
        """It cannot be repaired, which is a result and no error."""
        cap = self.world.run(self.grid.create_mutable(b"first")).cap
        self.delete_shares(cap, keep=8)
        said = self.check(cap.readonly(), repair=True)
        self.assertFalse(said["repair-attempted"])
        self.assertEqual(said["post-repair-results"]["results"]["count-shares-good"], 8)

    def test_lost_directory(self) -> None:
        cap = self.make_directory()
        self.delete_shares(cap)
        said = self.check(cap)
        self.assertEqual(said["summary"], "Unhealthy: no versions are recoverable")
        self.assertEqual(said["results"]["count-unrecoverable-versions"], 0)

    def test_page_escapes(self) -> None:
        said = {"results": {"healthy": True}, "summary": "<b>"}
        page = object_check_page(None, False, said).data
        self.assertNotIn(b"<b>", page)
        self.assertIn(b"healthy", page)


class TreeTestCase(GatewayTestCase):
    """Has a tree: a CHK file, a literal one, and a directory with a mutable file."""

    def setUp(self) -> None:
        super().setUp()
        self.chk = self.put(CHK_DATA)
        self.mutable = self.world.run(self.grid.create_mutable(b"mutable")).cap
        self.sub = self.make_directory(m=self.mutable)
        self.root = self.make_directory(chk=self.chk, lit=LitCap(b"hello"), sub=self.sub)


class StreamTests(TreeTestCase):
    def manifest(self) -> Lines:
        lines = Lines()
        self.run_now(stream_manifest(self.grid, self.root, lines))
        return lines

    def deep_check(self, **todo: bool) -> Lines:
        lines = Lines()
        work = stream_deep_check(self.grid, self.root, UpkeepRequest(**todo), lines)
        self.run_now(work)
        return lines

    def test_manifest(self) -> None:
        """Each object once, by the cap that grants most, and the statistics last."""
        lines = self.manifest()
        self.assertEqual(list(lines.objects()), ["", "chk", "lit", "sub", "sub/m"])
        one = lines.objects()["sub/m"]
        self.assertEqual((one["cap"], one["repaircap"]), (str(self.mutable), str(self.mutable)))
        self.assertEqual(one["verifycap"], str(self.mutable.verifier()))
        lit = lines.objects()["lit"]
        self.assertEqual((lit["verifycap"], lit["repaircap"], lit["storage-index"]), ("", "", ""))
        stats = json.loads(lines.lines[-1])
        self.assertEqual(stats["type"], "stats")
        self.assertEqual(stats["stats"]["count-directories"], 2)
        self.assertNotIn("count-unreadable-directories", stats["stats"])

    def test_deep_check(self) -> None:
        for todo in ({}, {"verify": True, "add_lease": True}):
            objects = self.deep_check(**todo).objects()
            self.assertEqual(sorted(objects), ["", "chk", "lit", "sub", "sub/m"])
            for path in ("", "chk", "sub", "sub/m"):
                self.assertEqual(objects[path]["check-results"]["summary"], "Healthy")
            self.assertEqual(
                objects["lit"]["check-results"],
                {"storage-index": "", "results": {"healthy": True}},
            )
            self.assertEqual(objects["sub/m"]["cap"], str(self.mutable))

    def test_deep_repair(self) -> None:
        self.delete_shares(self.chk, keep=4)
        self.delete_shares(self.mutable, keep=4)
        objects = self.deep_check(repair=True).objects()
        for path in ("chk", "sub/m"):
            self.assertTrue(objects[path]["check-and-repair-results"]["repair-successful"])
        self.assertEqual(
            objects["lit"]["check-and-repair-results"],
            {"storage-index": "", "repair-attempted": False},
        )
        self.assertFalse(objects["sub"]["check-and-repair-results"]["repair-attempted"])

    def test_dead_directory(self) -> None:
        """It is named at the end, after the statistics; what comes after it in order is there."""
        dead = self.make_directory()
        directory = self.grid.directory(self.root)
        self.world.run(directory.link("a dead one", dead))
        self.delete_shares(dead)
        for lines in (self.manifest(), self.deep_check()):
            self.assertIn("sub/m", lines.objects())
            self.assertIn("a dead one", lines.objects())
            self.assertEqual(lines.stats()["count-directories"], 3)
            [error] = lines.errors()
            self.assertTrue(error.startswith("ERROR: UnrecoverableFileError(a dead one: "), error)
            self.assertEqual(lines.lines[-1], error.encode())

    def test_dead_root(self) -> None:
        """There are no statistics of what could not be read."""
        self.delete_shares(self.root)
        lines = self.manifest()
        self.assertEqual(list(lines.objects()), [""])
        self.assertTrue(lines.lines[-1].startswith(b"ERROR: UnrecoverableFileError(the root: "))
        self.assertNotIn(b'"stats"', b"".join(lines.lines))

    def test_lost_file_and_refused_repair(self) -> None:
        """A lost file is a result; a repair that the engine refuses has its check, and an error line."""
        self.delete_shares(self.chk, keep=1)
        self.world.run(self.grid.overwrite(self.mutable, b"second"))
        self.delete_shares(self.mutable, keep=2)  # the newest cannot be read, and no other is there
        objects = self.deep_check(repair=True).objects()
        for path in ("chk", "sub/m"):
            said = objects[path]["check-and-repair-results"]
            self.assertFalse(said["repair-successful"])
            self.assertFalse(said["pre-repair-results"]["results"]["recoverable"])

    def test_slow_reader(self) -> None:
        """What is not read is not looked up."""
        lines = Lines(takes=2)
        running = Deferred.fromCoroutine(stream_manifest(self.grid, self.root, lines))
        self.world.clock.advance(100)
        self.assertEqual(len(lines.lines), 2)
        lines.takes = None
        lines.waiting.pop().callback(None)
        self.world.run(running)
        self.assertEqual(len(lines.lines), 6)

    def test_unknown_object(self) -> None:
        """It is listed with its cap, and counts as healthy where all are checked."""
        unknown = UnknownCap("URI:FUTURE:abc")
        self.assertEqual(object_json(("x",), unknown)["type"], "unknown")
        self.assertEqual(object_json(("x",), unknown)["verifycap"], "")
        self.assertEqual(object_json((), None)["cap"], "")


class OperationTests(TreeTestCase):
    """The same as results that are kept."""

    def finished(self, kind: str, root: DirectoryCap | None = None, **todo: bool) -> DeepOperation:
        operation = OPERATIONS[kind](root or self.root, UpkeepRequest(**todo))
        self.run_now(operation.run(self.grid, lambda _: None))
        operation.finished = True
        return operation

    def test_statistics(self) -> None:
        said = self.finished("start-deep-stats").json()
        self.assertEqual((said["api-version"], said["finished"]), (1, True))
        self.assertEqual((said["count-files"], said["count-mutable-files"]), (3, 1))
        self.assertNotIn("unreadable", said)

    def test_size(self) -> None:
        operation = self.finished("start-deep-size")
        size = operation.json()["size"]
        total = size["size-immutable-files"] + size["size-directories"]
        self.assertEqual(operation.text(), f"finished: yes\nsize: {total}\n")

    def test_manifest(self) -> None:
        operation = self.finished("start-manifest")
        said = operation.json()
        self.assertEqual(said["manifest"][0][0], [])
        self.assertEqual(len(said["manifest"]), 5)
        self.assertEqual(len(said["verifycaps"]), 4)
        self.assertIn("lit URI:LIT:nbswy3dp\n", operation.text())
        self.assertTrue(operation.text().startswith(f"finished: yes\n {self.root}\n"))

    def test_deep_check(self) -> None:
        self.delete_shares(self.chk, keep=4)
        operation = self.finished("start-deep-check")
        said = operation.json()
        self.assertEqual(said["count-objects-checked"], 4)
        self.assertEqual((said["count-objects-healthy"], said["count-objects-unhealthy"]), (3, 1))
        [[path, result]] = said["list-unhealthy-files"]
        self.assertEqual((path, result["results"]["count-shares-good"]), (["chk"], 4))
        self.assertEqual(operation.part(result["storage-index"]), result)
        self.assertIsNone(operation.part("unknown"))
        self.assertIn(b"1 damaged", operation_page("handle", operation).data)

    def test_deep_repair(self) -> None:
        self.delete_shares(self.chk, keep=4)
        said = self.finished("start-deep-check", repair=True).json()
        self.assertEqual(said["count-objects-unhealthy-pre-repair"], 1)
        self.assertEqual(said["count-objects-unhealthy-post-repair"], 0)
        self.assertEqual(
            (said["count-repairs-attempted"], said["count-repairs-successful"]), (1, 1)
        )

    def test_dead_directories(self) -> None:
        """One below the root is in the result; without the root there is none."""
        self.delete_shares(self.sub)
        said = self.finished("start-deep-stats").json()
        [sentence] = said["unreadable"]
        self.assertTrue(sentence.startswith("UnrecoverableFileError(sub: "))
        self.delete_shares(self.root)
        for kind in ("start-deep-stats", "start-manifest", "start-deep-check"):
            with self.assertRaises(NotEnoughSharesError):
                self.finished(kind)
