"""
Operations on whole trees: manifest, statistics, check and repair. Results are streams of lines, or kept in
memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, MutableCap, UnknownCap, writes
from pipegrid.core.text import printable
from pipegrid.errors import CapError, NotEnoughSharesError, PipegridError
from pipegrid.gateway.http_response import ResponseStream
from pipegrid.gateway.web_api.check_json import (
    Json,
    check_json,
    check_recoverable,
    corrupt_shares,
    is_healthy,
    repair_json,
    storage_index_text,
)
from pipegrid.transfer.results import CheckResult, RepairResult
from pipegrid.transfer.upkeep import UpkeepOutcome, UpkeepRequest
from pipegrid.tree.directory_reading import kind_of
from pipegrid.tree.tree_check import CheckReports, FirstMet, check_trees
from pipegrid.tree.tree_grid import Grid
from pipegrid.tree.walk import Met, TreePath, TreeStats, Unreadable, walk

# An operation reports everything below a directory: each object once, but literal objects wherever they
# occur.
#
# If a directory cannot be read, the operation goes on, and reports the directory at the end: in a stream by a
# line that begins with "ERROR:", as in Tahoe-LAFS; in a result under "unreadable". The operation fails only
# if the root cannot be read.
#
# **Failed repairs.** If a repair fails, its error is known, but not what its check found. So the object is
# checked again at the end, and both are reported.

MAX_ERRORS = 100
"""Maximum number of errors listed, and of objects checked again; further errors are only counted."""

STATS_VERSION = 1


def object_json(path: TreePath, cap: Cap | None) -> Json:
    """Return the fields of an object in a stream; ``cap`` is the known cap that grants most."""
    return {
        "path": list(path),
        "cap": "" if cap is None else str(cap),
        "type": kind_of(cap) if not isinstance(cap, DirectoryCap) else "directory",
        "verifycap": verify_cap_text(cap),
        "repaircap": _repair_cap_text(cap),
        "storage-index": storage_index_text(cap),
    }


def verify_cap_text(cap: Cap | None) -> str:
    """Return the verify cap of an object; "" if the object has none."""
    if cap is None or isinstance(cap, UnknownCap):
        return ""
    verifier = cap.verifier()
    return "" if verifier is None else str(verifier)


def _repair_cap_text(cap: Cap | None) -> str:
    if isinstance(cap, ChkCap):
        return str(cap.verifier())
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    return str(cap) if isinstance(file, MutableCap) and writes(cap) else ""


def stats_json(stats: TreeStats) -> Json:
    """Return the statistics of a tree, as the web API defines them."""
    fields = stats.fields()
    del fields["count-unreadable-directories"]
    return {"api-version": STATS_VERSION, **fields}


def error_name(error: BaseException | None, cap: Cap | None = None) -> str:
    """Return Tahoe-LAFS's name for an error; some clients compare these names."""
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(error, NotEnoughSharesError):
        if isinstance(file, MutableCap):
            return "UnrecoverableFileError"
        return "NotEnoughSharesError" if error.found else "NoSharesError"
    return type(error).__name__


@attrs.define
class OperationProblems:
    """
    Messages about failed reads and repairs, at most ``MAX_ERRORS``.

    Attributes:
        sentences: the messages; each begins with the name of the error.
        left_out: number of further failures.
        root: why the root could not be read; None if it could.
    """

    sentences: list[str] = attrs.field(factory=list)
    left_out: int = 0
    root: Exception | None = None

    def add(self, path: TreePath, cap: Cap | None, error: BaseException | None) -> None:
        """Record the error of an object at a path below the root."""
        if not path and isinstance(error, Exception) and isinstance(cap, DirectoryCap):
            self.root = error
        if len(self.sentences) >= MAX_ERRORS:
            self.left_out += 1
            return
        where = printable("/".join(path))[:1000] or "the root"
        self.sentences.append(f"{error_name(error, cap)}({where}: {error})")

    @property
    def all_sentences(self) -> list[str]:
        """The messages, and one about the number of further failures."""
        more = [f"{self.left_out} more objects failed"] if self.left_out else []
        return [*self.sentences, *more]

    def lines(self) -> list[bytes]:
        """Return the messages as lines for the end of a stream."""
        return [f"ERROR: {sentence}\n".encode() for sentence in self.all_sentences]

    def fields(self) -> Json:
        """Return the field of a result that lists the messages; {} if there are none."""
        return {"unreadable": self.all_sentences} if self.sentences else {}


ReaderReady = Callable[[], Awaitable[None]]


async def visit(
    grid: Grid,
    root: Cap,
    stats: TreeStats,
    problems: OperationProblems,
    found: Callable[[TreePath, Cap | None], None] | None = None,
    ready: ReaderReady | None = None,
) -> None:
    """
    Walk a tree, add to the statistics, and report each object once.

    Args:
        found: called with each object's path and with the known cap that grants most.
        ready: returns when the client has read enough for the next object to be reported.
    """
    with walk(grid, root) as tree:
        async for met in tree:
            stats.count(met)
            if isinstance(met, Unreadable):
                problems.add(met.path, met.cap, met.error)
            elif met.again:
                continue
            if found is not None:
                if ready is not None:
                    await ready()
                found(met.path, met.best or met.cap)


async def stream_manifest(grid: Grid, root: DirectoryCap, sink: ResponseStream) -> None:
    """Send a line for each object of a tree, then the statistics, then the errors."""
    stats, problems = TreeStats(), OperationProblems()

    def found(path: TreePath, cap: Cap | None) -> None:
        sink.write(_line(object_json(path, cap)))

    await visit(grid, root, stats, problems, found, sink.ready)
    _end_stream(sink, stats, problems)


async def stream_deep_check(
    grid: Grid, root: DirectoryCap, todo: UpkeepRequest, sink: ResponseStream
) -> None:
    """Send a line with the check result of each object of a tree, then the statistics, then the errors."""
    stats, problems = TreeStats(), OperationProblems()
    key = "check-and-repair-results" if todo.repair else "check-results"

    def ended(one: CheckedObject) -> None:
        sink.write(_line({**object_json(one.path, one.cap), key: one.json}))

    await deep_check(grid, root, todo, stats, problems, ended, sink.ready)
    _end_stream(sink, stats, problems)


def _end_stream(sink: ResponseStream, stats: TreeStats, problems: OperationProblems) -> None:
    if problems.root is None:
        sink.write(_line({"type": "stats", "stats": stats_json(stats)}))
    for line in problems.lines():
        sink.write(line)


def _line(value: Json) -> bytes:
    return json.dumps(value).encode("ascii") + b"\n"


# Checks.


@attrs.frozen
class CheckedObject:
    """
    The outcome of checking one object.

    Attributes:
        before, after: check results before and after the repair; both the same if there was none. None: the
            object has no shares, or is of unknown kind.
        json: the outcome as the web API reports it.
    """

    path: TreePath
    cap: Cap | None
    before: CheckResult | None
    after: CheckResult | None
    json: Json


def checked(
    place: FirstMet, outcome: CheckResult | RepairResult | None, repair: bool, failed: bool = False
) -> CheckedObject:
    """
    Return an object with its outcome; ``failed``: the outcome is a check, and the object's repair failed.
    """
    before = outcome.before if isinstance(outcome, RepairResult) else outcome
    after = outcome.after if isinstance(outcome, RepairResult) else outcome
    if before is not None and not before.total_shares:
        before = after = outcome = None
    if not repair:
        said = check_json(before)
    elif outcome is None:
        said = {"storage-index": "", "repair-attempted": False}
    else:
        said = repair_json(outcome, failed=failed)
    return CheckedObject(place.path, place.best, before, after, said)


async def deep_check(
    grid: Grid,
    root: Cap,
    todo: UpkeepRequest,
    stats: TreeStats,
    problems: OperationProblems,
    ended: Callable[[CheckedObject], None],
    ready: ReaderReady | None = None,
) -> None:
    """
    Check each object of a tree, and repair it if requested.

    Args:
        ended: called with each object when its check or repair has ended.
        ready: returns when the client has read enough for the next object to be checked.

    Raises:
        UnhappyError: no server can be used.
    """
    again: list[tuple[FirstMet, Failure]] = []

    def came(_number: int, place: FirstMet, outcome: UpkeepOutcome) -> None:
        if not isinstance(outcome, Failure):
            assert isinstance(outcome, (CheckResult, RepairResult))
            ended(checked(place, outcome, todo.repair))
        elif kind_of(place.best) == "unknown" and not storage_index_text(place.best):
            ended(checked(place, None, todo.repair))
        elif todo.repair and len(again) < MAX_ERRORS:
            again.append((place, outcome))
        else:
            problems.add(place.path, place.best, outcome.value)

    def met(_number: int, one: Met) -> None:
        stats.count(one)

    def unreadable(_number: int, place: FirstMet, error: Exception) -> None:
        problems.add(place.path, place.best, error)

    reports = CheckReports(ended=came, unreadable=unreadable, met=met, ready=ready)
    await check_trees(grid, [root], todo, reports=reports)
    for place, failure in again:
        await _check_failed_repair(grid, place, failure, todo, problems, ended)


async def _check_failed_repair(
    grid: Grid,
    place: FirstMet,
    failure: Failure,
    todo: UpkeepRequest,
    problems: OperationProblems,
    ended: Callable[[CheckedObject], None],
) -> None:
    cannot = failure.check(CapError) is not None
    try:
        assert place.best is not None
        result = await grid.check(place.best, verify=todo.verify)
    except PipegridError:
        problems.add(place.path, place.best, failure.value)
        return
    ended(checked(place, result, True, failed=not cannot))
    if not cannot:  # otherwise no write cap was known, so no repair began
        problems.add(place.path, place.best, failure.value)


async def check_one(grid: Grid, cap: Cap, todo: UpkeepRequest) -> Json:
    """
    Check one object, and repair it if requested; return the outcome as the web API reports it.

    Raises:
        PipegridError: a repair failed, or objects of this kind cannot be checked.
    """
    if not todo.repair:
        return check_json(await grid.check(cap, verify=todo.verify, add_lease=todo.add_lease))
    [outcome] = await grid.check_many(
        [cap], verify=todo.verify, add_lease=todo.add_lease, repair=True
    )
    if isinstance(outcome, Failure):
        file = cap.file if isinstance(cap, DirectoryCap) else cap
        if isinstance(file, MutableCap) and not writes(cap) and outcome.check(CapError):
            return repair_json(await grid.check(cap, verify=todo.verify))
        outcome.raiseException()
    if isinstance(outcome, CheckResult):
        check_recoverable(outcome)
    return repair_json(outcome)


# Operations whose results are kept in memory until clients have fetched them.


class DeepOperation:
    """
    An operation on a tree, and its result so far.

    Args:
        todo: options of the check.

    Attributes:
        finished: whether the operation has ended.
        error: why the operation failed; None: it did not.
        memory_bytes: estimated memory of the result.
    """

    json_only = False

    def __init__(self, root: DirectoryCap, todo: UpkeepRequest) -> None:
        self.root = root
        self.todo = todo
        self.finished = False
        self.error: Exception | None = None
        self.memory_bytes = 0
        self.stats = TreeStats()
        self.problems = OperationProblems()

    async def run(self, grid: Grid, hold: Callable[[int], None]) -> None:
        """
        Run the operation; ``hold`` is called with the number of bytes before the result grows.

        Raises:
            PipegridError: the operation failed.
        """
        await self._run(grid, hold)
        if self.problems.root is not None:
            raise self.problems.root

    async def _run(self, grid: Grid, hold: Callable[[int], None]) -> None:
        await visit(grid, self.root, self.stats, self.problems)

    def json(self) -> Json:
        """Return state and result as JSON."""
        raise NotImplementedError

    def text(self) -> str:
        """Return state and result as lines of text for people and scripts."""
        raise NotImplementedError

    def part(self, storage_index: str) -> Json | None:
        """Return the check result of one object; None if this operation has not checked the object."""
        return None

    title = "Operation"

    @property
    def _finished_text(self) -> str:
        return f"finished: {'yes' if self.finished else 'no'}\n"


class DeepStats(DeepOperation):
    """Operation that counts the objects of a tree."""

    json_only = True
    title = "Deep statistics"

    def json(self) -> Json:
        return {**stats_json(self.stats), "finished": self.finished, **self.problems.fields()}

    def text(self) -> str:
        return json.dumps(self.json(), indent=1)


class DeepSize(DeepOperation):
    """Operation that adds up the sizes of all files and directories of a tree."""

    title = "Deep size"

    def json(self) -> Json:
        size = stats_json(self.stats)
        return {"finished": self.finished, "size": size, **self.problems.fields()}

    def text(self) -> str:
        counted = self.stats.fields()
        size = counted["size-immutable-files"] + counted["size-directories"]
        return f"{self._finished_text}size: {size}\n"


class Manifest(DeepOperation):
    """Operation that lists all objects of a tree."""

    title = "Manifest"

    def __init__(self, root: DirectoryCap, todo: UpkeepRequest) -> None:
        super().__init__(root, todo)
        self._objects: list[tuple[TreePath, str]] = []
        self._verify_caps: dict[str, None] = {}
        self._storage_indexes: dict[str, None] = {}

    async def _run(self, grid: Grid, hold: Callable[[int], None]) -> None:
        def found(path: TreePath, cap: Cap | None) -> None:
            text, verify_cap = "" if cap is None else str(cap), verify_cap_text(cap)
            names = sum(len(name) for name in path)
            hold(_HELD_BYTES + 4 * names + 2 * len(text) + 2 * len(verify_cap))
            self._objects.append((path, text))
            if verify_cap:
                self._verify_caps[verify_cap] = None
                self._storage_indexes[storage_index_text(cap)] = None

        await visit(grid, self.root, self.stats, self.problems, found)

    def json(self) -> Json:
        said: Json = {
            "finished": self.finished,
            "origin": storage_index_text(self.root),
            "stats": stats_json(self.stats),
            **self.problems.fields(),
        }
        if self.finished:
            said["manifest"] = [[list(path), cap] for path, cap in self._objects]
            said["verifycaps"] = list(self._verify_caps)
            said["storage-index"] = list(self._storage_indexes)
        return said

    def text(self) -> str:
        lines = [f"{'/'.join(path)} {cap}\n" for path, cap in self._objects]
        return self._finished_text + "".join(lines)


_HELD_BYTES = 600
"""Estimated memory of an object in a result, in addition to its texts."""


class DeepCheck(DeepOperation):
    """Operation that checks all objects of a tree, and repairs them if requested."""

    title = "Deep check"

    def __init__(self, root: DirectoryCap, todo: UpkeepRequest) -> None:
        super().__init__(root, todo)
        self._checked: dict[str, Json] = {}
        self._unhealthy: list[tuple[TreePath, Json]] = []
        self._counts: Counter[str] = Counter()
        self._corrupt: list[list[Any]] = []
        self._remaining_corrupt: list[list[Any]] = []

    async def _run(self, grid: Grid, hold: Callable[[int], None]) -> None:
        def ended(one: CheckedObject) -> None:
            if one.before is not None:
                hold(2 * len(json.dumps(one.json)) + _HELD_BYTES)
                self._note(one, one.before, one.after or one.before)

        await deep_check(grid, self.root, self.todo, self.stats, self.problems, ended)

    def _note(self, one: CheckedObject, before: CheckResult, after: CheckResult) -> None:
        healthy = is_healthy(before)
        self._counts["healthy" if healthy else "unhealthy"] += 1
        self._counts["healthy after" if is_healthy(after) else "unhealthy after"] += 1
        if one.json.get("repair-attempted"):
            self._counts["successful" if one.json["repair-successful"] else "unsuccessful"] += 1
        self._corrupt += corrupt_shares(before)
        self._remaining_corrupt += corrupt_shares(after)
        self._checked[one.json["storage-index"]] = one.json
        if not healthy:
            self._unhealthy.append((one.path, check_json(before)))

    def part(self, storage_index: str) -> Json | None:
        return self._checked.get(storage_index)

    def json(self) -> Json:
        counts = self._counts
        said: Json = {
            "finished": self.finished,
            "root-storage-index": storage_index_text(self.root),
            "count-objects-checked": counts["healthy"] + counts["unhealthy"],
        }
        if self.todo.repair:
            said |= {
                "count-objects-healthy-pre-repair": counts["healthy"],
                "count-objects-unhealthy-pre-repair": counts["unhealthy"],
                "count-objects-healthy-post-repair": counts["healthy after"],
                "count-objects-unhealthy-post-repair": counts["unhealthy after"],
                "count-repairs-attempted": counts["successful"] + counts["unsuccessful"],
                "count-repairs-successful": counts["successful"],
                "count-repairs-unsuccessful": counts["unsuccessful"],
                "count-corrupt-shares-pre-repair": len(self._corrupt),
                "count-corrupt-shares-post-repair": len(self._remaining_corrupt),
                "list-corrupt-shares": self._corrupt,
                "list-remaining-corrupt-shares": self._remaining_corrupt,
            }
        else:
            said |= {
                "count-objects-healthy": counts["healthy"],
                "count-objects-unhealthy": counts["unhealthy"],
                "count-corrupt-shares": len(self._corrupt),
                "list-corrupt-shares": self._corrupt,
            }
        said["list-unhealthy-files"] = [[list(path), result] for path, result in self._unhealthy]
        return {**said, "stats": stats_json(self.stats), **self.problems.fields()}

    def text(self) -> str:
        shown = {key: value for key, value in self.json().items() if isinstance(value, (int, str))}
        lines = [f"{key}: {value}\n" for key, value in shown.items() if key != "finished"]
        return self._finished_text + "".join(lines)


OPERATIONS: Mapping[str, type[DeepOperation]] = {
    "start-deep-check": DeepCheck,
    "start-manifest": Manifest,
    "start-deep-size": DeepSize,
    "start-deep-stats": DeepStats,
}
"""Operations by the names that the web API gives them."""
