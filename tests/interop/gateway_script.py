"""
What a person does with Tahoe-LAFS's gateway, from ``put`` to ``backup``, and what comes of it.

``run`` checks that every byte comes back, and returns what else there is to tell: counts of shares, what
was repaired, what ``tahoe backup`` says. It is the same on every grid of ten servers, or should be.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

from tests.interop.gateway_world import World, flip_byte, patiently, share_files, tahoe
from tests.interop.processes import Gateway

SIZES = (0, 55, 56, 1000, 131_073, (1 << 20) + 1, (3 << 20) + 7)
TREE = {
    "empty": 0,
    "literal": 40,
    "small": 3000,
    "sub/larger": 400_000,
    "sub/deep/er/leaf": 70_000,
    "sub/deep/é ü": 900,
}
IMMUTABLE_BLOCK_AT = (
    12 + 36 + 5
)  # of the share file: container, share header, within the first block
MUTABLE_BLOCK_AT = 468 + 8000  # container; then keys, signature and hashes, in less than 4000 bytes
COUNTS = (
    "healthy",
    "recoverable",
    "count-shares-good",
    "count-corrupt-shares",
    "count-good-share-hosts",
    "count-recoverable-versions",
    "count-unrecoverable-versions",
)


class Script:
    """
    One run.

    Args:
        world: whose servers' share files are deleted and damaged.
        gateway: Tahoe-LAFS's.
        scratch: a directory for files to come and go.
        seed: of all content, so that runs do not meet each other's files.
    """

    def __init__(self, world: World, gateway: Gateway, scratch: Path, seed: str) -> None:
        self._world = world
        self._gateway = gateway
        self._scratch = scratch
        self._random = random.Random(seed)
        self._outcome: list[tuple[str, Any]] = []

    def run(self) -> list[tuple[str, Any]]:
        """Do all of it; returns what came of each step."""
        self._scratch.mkdir()
        for step in (
            self._put_and_get,
            self._mkdir,
            self._copy,
            self._backup,
            self._repair_immutable,
            self._mutable,
            self._partial_writes,
            self._repair_mutable,
        ):
            step()
        return self._outcome

    def _note(self, step: str, what: Any) -> None:
        self._outcome.append((step, what))

    def _tahoe(self, *arguments: str) -> str:
        return tahoe("-d", str(self._gateway.directory), *arguments)

    def _data(self, size: int) -> bytes:
        return self._random.randbytes(size)

    def _ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Ask the gateway something when it is connected to all servers."""

        def ask() -> bytes:
            self._world.until_connected(self._gateway)
            return self._gateway.request(method, path, data)

        return patiently(self._gateway, ask)

    def _put(self, data: bytes, query: str = "") -> str:
        return self._ask("PUT", f"uri{query}", data).decode().strip()

    def _get(self, cap: str) -> bytes:
        return self._ask("GET", f"uri/{cap}")

    def _check(self, cap: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._post(f"uri/{cap}?t=check&verify=true&output=JSON"))
        return found

    def _counts(self, results: dict[str, Any]) -> dict[str, Any]:
        return {key: results[key] for key in COUNTS if key in results}

    def _put_and_get(self) -> None:
        for size in SIZES:
            data = self._data(size)
            cap = self._put(data)
            _same(self._get(cap), data, f"{size} bytes")
            if cap.startswith("URI:CHK:"):
                counts = self._counts(self._check(cap)["results"])
                self._note(f"verify {size} bytes", counts)

    def _mkdir(self) -> None:
        top = self._post("uri?t=mkdir").decode()
        for kind in ("SDMF", "MDMF"):
            self._post(f"uri/{top}/{kind}?t=mkdir&format={kind}")
            for number in range(3):
                data = self._data(100 * number)
                self._ask("PUT", f"uri/{top}/{kind}/file{number}", data)
                _same(self._get(f"{top}/{kind}/file{number}"), data, kind)
            self._ask("DELETE", f"uri/{top}/{kind}/file1")
            listing = json.loads(self._ask("GET", f"uri/{top}/{kind}?t=json"))
            self._note(f"list {kind}", [listing[0], *sorted(_names(listing))])

    def _copy(self) -> None:
        """``tahoe cp -r`` up and down, and ``deep-check --verify``."""
        up = self._scratch / "up"
        contents = self._plant(up)
        self._tahoe("create-alias", "grid")
        self._tahoe("cp", "-r", str(up), "grid:")
        down = self._scratch / "down"
        self._tahoe("cp", "-r", "grid:up", str(down))
        got = {
            str(path.relative_to(down / "up")): path.read_bytes()
            for path in down.rglob("*")
            if path.is_file()
        }
        _same(got, contents, "the tree")
        lines = self._tahoe("deep-check", "--verify", "--raw", "grid:").splitlines()
        checked = [json.loads(line) for line in lines if line]
        stats = [unit for unit in checked if unit.get("type") == "stats"]
        self._note("deep-check units", len(checked) - len(stats))
        for unit in checked:
            results = (unit.get("check-results") or {}).get("results", {})
            if "count-shares-good" in results:
                self._note(f"deep-check {'/'.join(unit['path'])}", self._counts(results))

    def _backup(self) -> None:
        """A second backup of the same tree stores nothing anew; one changed file is one file."""
        source = self._scratch / "source"
        self._plant(source)
        for number in range(3):
            if number == 2:
                (source / "small").write_bytes(self._data(3001))
            said = self._tahoe("backup", "-v", str(source), "grid:backups")
            done = re.findall(r"\d+ files uploaded.*|\d+ directories created.*", said)
            self._note(f"backup {number}", done)
        down = self._scratch / "restored"
        self._tahoe("cp", "-r", "grid:backups/Latest", str(down))
        restored = {path.name: path.read_bytes() for path in down.rglob("*") if path.is_file()}
        original = {path.name: path.read_bytes() for path in source.rglob("*") if path.is_file()}
        _same(restored, original, "the backup")

    def _plant(self, top: Path) -> dict[str, bytes]:
        contents = {name: self._data(size) for name, size in TREE.items()}
        for name, data in contents.items():
            path = top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return contents

    def _repair_immutable(self) -> None:
        """Shares that are gone come back; so does one whose damaged file the operator then removes."""
        data = self._data(200_000)
        cap = self._put(data)
        self._lose_and_repair("immutable", cap, IMMUTABLE_BLOCK_AT)
        _same(self._get(cap), data, "the repaired file")

    def _mutable(self) -> None:
        """Mutable files are made, read, overwritten, shortened, grown, and verified."""
        for kind in ("SDMF", "MDMF"):
            sizes = (0, 1, 5000, 300_000, 70) if kind == "SDMF" else (0, 1, 5000, 1_300_000, 70)
            data = self._data(777)
            cap = self._put(data, f"?format={kind}")
            _same(self._get(cap), data, kind)
            for size in sizes:
                data = self._data(size)
                self._ask("PUT", f"uri/{cap}", data)
                _same(self._get(cap), data, f"{kind}, {size} bytes")
            self._note(f"verify {kind}", self._counts(self._check(cap)["results"]))

    def _partial_writes(self) -> None:
        """Parts of a mutable file are written, within a segment, across segments, and behind the end."""
        for kind, size in (("SDMF", 5000), ("MDMF", 900_000)):
            whole = bytearray(self._data(size))
            cap = self._put(bytes(whole), f"?format={kind}")
            for offset, length in ((0, 10), (size // 3, size // 2), (size - 7, 5), (size, 999)):
                part = self._data(length)
                whole[offset : offset + length] = part
                self._ask("PUT", f"uri/{cap}?offset={offset}", part)
                _same(self._get(cap), bytes(whole), f"{kind}, a write at {offset}")
            self._note(f"verify {kind} in parts", self._counts(self._check(cap)["results"]))

    def _repair_mutable(self) -> None:
        for kind in ("SDMF", "MDMF"):
            data = self._data(50_000)
            cap = self._put(data, f"?format={kind}")
            self._lose_and_repair(kind, cap, MUTABLE_BLOCK_AT)
            _same(self._get(cap), data, f"the repaired {kind} file")
            self._ask("PUT", f"uri/{cap}", data[:99])
            _same(self._get(cap), data[:99], f"the repaired {kind} file, overwritten")

    def _lose_and_repair(self, what: str, cap: str, block_at: int) -> None:
        storage_index = self._check(cap)["storage-index"]
        files = share_files(self._world.servers, storage_index)
        self._note(f"{what}: shares", sorted(files))
        for number in (0, 3, 8):
            files[number].unlink()
        self._note(f"{what}: three are gone", self._repair(cap))
        files = share_files(self._world.servers, storage_index)
        self._note(f"{what}: shares after repair", sorted(files))
        flip_byte(files[5], block_at)
        self._note(f"{what}: one is damaged", self._repair(cap))
        files[5].unlink(missing_ok=True)
        self._note(f"{what}: that is gone", self._repair(cap))
        self._note(
            f"{what}: shares in the end", sorted(share_files(self._world.servers, storage_index))
        )
        self._tahoe("check", "--verify", "--repair", cap)

    def _repair(self, cap: str) -> dict[str, Any]:
        found = json.loads(
            self._post(f"uri/{cap}?t=check&verify=true&repair=true&output=JSON").decode()
        )
        outcome = {
            key: found.get(key) for key in ("repair-attempted", "repair-successful") if key in found
        }
        for when in ("pre-repair-results", "post-repair-results"):
            if when in found:
                outcome[when] = self._counts(found[when]["results"])
                # Where the repairer puts them depends on the order of its sets: sometimes two to one server.
                del outcome[when]["count-good-share-hosts"]
        return outcome

    def _post(self, path: str) -> bytes:
        return self._ask("POST", path, b"").strip()


def _names(listing: Any) -> list[str]:
    return list(listing[1]["children"])


def _same(got: Any, wanted: Any, what: str) -> None:
    """What comes back is what went in; a difference is not printed whole."""
    if got != wanted:
        raise AssertionError(f"{what}: something else came back ({len(got)}, not {len(wanted)})")


def run(world: World, gateway: Gateway, scratch: Path, seed: str) -> list[tuple[str, Any]]:
    """Do all of it. See ``Script``."""
    try:
        return Script(world, gateway, scratch, seed).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
