"""
What is done with mutable files and directories, by either of the two that are compared, and how it is proven.

An operation has four parts: what it works on is made by a third client; the client that is measured may have
something to do before; then what counts; and in the end the third client looks what came of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import quote

import attrs
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.threads import deferToThreadPool

from misc.speedtest.peers.clients import GatewayClient, PipegridClient
from pipegrid import Grid
from pipegrid.core.caps import parse_cap
from pipegrid.speedtest.benchmark_clients import Comparing

SMALL = 200
LARGE = 10**7
CHILDREN = 10
CREATED = 5
WARMING = b"warm" * 250


class MutableClient(Protocol):
    """One of the two."""

    async def warm(self) -> None:
        """Have all connections up, by storing and fetching files that do not count."""

    async def create(self, data: bytes) -> str:
        """Store a mutable file, SDMF; returns its write cap."""

    async def mkdir(self) -> str:
        """Store an empty directory; returns its write cap."""

    async def link(self, directory: str, name: str, cap: str) -> None:
        """Put a child into a directory."""

    async def put_into(self, directory: str, name: str, data: bytes) -> None:
        """Store an immutable file, and link it."""

    async def rename(self, directory: str, old: str, new: str) -> None:
        """Give a child another name."""

    async def unlink(self, directory: str, name: str) -> None:
        """Take a child out."""

    async def overwrite(self, cap: str, data: bytes) -> None:
        """Replace the content of a mutable file."""

    async def update(self, cap: str, offset: int, data: bytes) -> None:
        """Replace some of it."""

    async def list(self, directory: str) -> dict[str, str]:
        """Return the read caps of a directory's children."""

    async def get(self, cap: str, sink: Comparing) -> None:
        """Fetch a mutable file."""

    def cpu_s(self) -> float:
        """Return the CPU time that it has used so far."""


class PipegridFiles(PipegridClient):
    """``Grid``, in this process."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._files = grid

    async def warm(self) -> None:  # type: ignore[override]
        """Ask all servers how they are, and use both kinds of connections."""
        await self._files.status()
        stored = await self._files.put(WARMING)
        assert await self._files.read(stored.cap) == WARMING
        created = await self._files.create_mutable(WARMING)
        assert await self._files.read(created.cap.readonly()) == WARMING

    async def create(self, data: bytes) -> str:
        """Store a mutable file."""
        return str((await self._files.create_mutable(data)).cap)

    async def mkdir(self) -> str:
        """Store an empty directory."""
        return str((await self._files.create_directory()).cap)

    async def link(self, directory: str, name: str, cap: str) -> None:
        """Put a child into a directory."""
        await self._files.directory(directory).link(name, cap)

    async def put_into(self, directory: str, name: str, data: bytes) -> None:
        """Store an immutable file, and link it."""
        await self._files.directory(directory).put(name, data)

    async def rename(self, directory: str, old: str, new: str) -> None:
        """Give a child another name."""
        await self._files.directory(directory).rename(old, new)

    async def unlink(self, directory: str, name: str) -> None:
        """Take a child out."""
        await self._files.directory(directory).unlink(name)

    async def overwrite(self, cap: str, data: bytes) -> None:
        """Replace the content."""
        await self._files.overwrite(cap, data)

    async def update(self, cap: str, offset: int, data: bytes) -> None:
        """Replace some of it."""
        await self._files.update(cap, offset, data)

    async def list(self, directory: str) -> dict[str, str]:
        """Return the children."""
        children = await self._files.directory(directory).list()
        return {name: str(child.read_cap) for name, child in children.items()}

    async def get(self, cap: str, sink: Comparing) -> None:  # type: ignore[override]
        """Fetch a mutable file."""
        await self._files.get(cap, cast(BinaryIO, sink))


class GatewayFiles(GatewayClient):
    """A gateway of Tahoe-LAFS: each operation is one request."""

    def __init__(self, gateway: Any, reactor: Any) -> None:
        super().__init__(gateway, reactor, 1)

    async def warm(self) -> None:  # type: ignore[override]
        """It keeps its connections up; store and fetch, as the other does."""
        cap = await self._ask("PUT", "/uri", WARMING)
        assert await self._ask("GET", f"/uri/{cap.decode()}") == WARMING
        await self.create(WARMING)

    async def create(self, data: bytes) -> str:
        """Store a mutable file."""
        return (await self._ask("PUT", "/uri?format=SDMF", data)).decode().strip()

    async def mkdir(self) -> str:
        """Store an empty directory."""
        return (await self._ask("POST", "/uri?t=mkdir", b"")).decode().strip()

    async def link(self, directory: str, name: str, cap: str) -> None:
        """Put a child into a directory."""
        await self._ask("PUT", f"/uri/{quote(directory)}/{name}?t=uri", cap.encode())

    async def put_into(self, directory: str, name: str, data: bytes) -> None:
        """Store an immutable file, and link it."""
        await self._ask("PUT", f"/uri/{quote(directory)}/{name}", data)

    async def rename(self, directory: str, old: str, new: str) -> None:
        """Give a child another name."""
        query = f"t=rename&from_name={old}&to_name={new}"
        await self._ask("POST", f"/uri/{quote(directory)}?{query}", b"")

    async def unlink(self, directory: str, name: str) -> None:
        """Take a child out."""
        await self._ask("DELETE", f"/uri/{quote(directory)}/{name}")

    async def overwrite(self, cap: str, data: bytes) -> None:
        """Replace the content."""
        await self._ask("PUT", f"/uri/{quote(cap)}", data)

    async def update(self, cap: str, offset: int, data: bytes) -> None:
        """Replace some of it."""
        await self._ask("PUT", f"/uri/{quote(cap)}?offset={offset}", data)

    async def list(self, directory: str) -> dict[str, str]:
        """Return the children."""
        _, found = json.loads(await self._ask("GET", f"/uri/{quote(directory)}?t=json"))
        return {name: child[1]["ro_uri"] for name, child in found["children"].items()}

    async def get(self, cap: str, sink: Comparing) -> None:  # type: ignore[override]
        """Fetch a mutable file."""
        await super().get(cap, sink)

    def _ask(self, method: str, path: str, data: bytes | None = None) -> Deferred[bytes]:
        return deferToThreadPool(
            self._reactor, self._threads, self._gateway.ask, method, path, data
        )


@attrs.define
class Subject:
    """
    What one turn of an operation works on.

    Attributes:
        maker: the client that is not measured.
        cap: of the file or directory.
        data: what the file holds, or shall hold.
        children: names and read caps that the directory has, or shall have.
        made: caps of what the operation itself has made.
    """

    maker: Grid
    rng: random.Random
    cap: str = ""
    data: bytes = b""
    children: dict[str, str] = attrs.Factory(dict)
    made: list[str] = attrs.Factory(list)
    sink: Comparing | None = None

    # Making.

    async def nothing(self) -> None:
        """Make nothing but data."""
        self.data = self.rng.randbytes(SMALL)

    async def file(self) -> None:
        """A small file."""
        self.data = self.rng.randbytes(SMALL)
        self.cap = str((await self.maker.create_mutable(self.data)).cap)

    async def large_file(self) -> None:
        """A file of 10 MB, MDMF."""
        self.data = self.rng.randbytes(LARGE)
        self.cap = str((await self.maker.create_mutable(self.data, format="mdmf")).cap)
        self.sink = Comparing(self.data)

    async def directory(self) -> None:
        """A directory with immutable files."""
        directory = await self.maker.create_directory()
        adding = []
        for number in range(CHILDREN):
            name, stored = f"child{number}", await self.maker.put(self.rng.randbytes(SMALL))
            self.children[name] = str(stored.cap)
            adding.append(directory.link(name, stored.cap))
        await DeferredList(adding, fireOnOneErrback=True)
        self.cap = str(directory.cap)

    # Looking what came of it.

    async def check_content(self) -> None:
        """The file holds what it shall."""
        if await self.maker.read(self.cap) != self.data:
            raise ValueError("the mutable file does not hold what was written")

    async def check_got(self) -> None:
        """What was fetched is what was stored."""
        assert self.sink is not None
        self.sink.check()

    async def check_made(self) -> None:
        """The files that were made hold what they shall."""
        if len(set(self.made)) != CREATED:
            raise ValueError("not every file that was made has a cap of its own")
        for cap in self.made:
            if await self.maker.read(cap) != self.data:
                raise ValueError("a mutable file does not hold what was stored")

    async def check_directories(self) -> None:
        """The directories that were made are empty."""
        for cap in self.made:
            if await self.maker.directory(cap).list():
                raise ValueError("a new directory is not empty")

    async def check_children(self) -> None:
        """The directory has the children that it shall have, and each can be read."""
        found = await self.maker.directory(self.cap).list()
        if {name: str(child.read_cap) for name, child in found.items()} != self.children:
            raise ValueError("the directory does not have the children that it should have")

    async def check_put(self) -> None:
        """There is one child more, with the data."""
        found = await self.maker.directory(self.cap).list()
        child = found.pop("new", None)
        if child is None or await self.maker.read(cast(Any, child.read_cap)) != self.data:
            raise ValueError("the file that was put into the directory is not there")
        if found.keys() != self.children.keys():
            raise ValueError("the directory lost other children")

    async def check_listed(self) -> None:
        """What was listed is what is there."""
        if json.loads(self.made.pop()) != self.children:
            raise ValueError("the directory was not listed as it is")


Work = Callable[[MutableClient, Subject], Awaitable[None]]


@attrs.frozen
class Operation:
    """
    One row of the comparison.

    Attributes:
        times: how often it is done, one after the other; what is told is the time of one.
        before: what the same client does first, outside the time that counts.
    """

    verb: str
    what: str
    prepare: Callable[[Subject], Awaitable[None]]
    work: Work
    check: Callable[[Subject], Awaitable[None]]
    times: int = 1
    before: tuple[Work, ...] = ()

    @property
    def name(self) -> str:
        """As results have it."""
        return f"{self.verb} {self.what}"


async def _create(client: MutableClient, subject: Subject) -> None:
    subject.made.append(await client.create(subject.data))


async def _mkdir(client: MutableClient, subject: Subject) -> None:
    subject.made.append(await client.mkdir())


async def _link(client: MutableClient, subject: Subject) -> None:
    cap = subject.children["new"] = subject.children["child0"]
    await client.link(subject.cap, "new", cap)


async def _put(client: MutableClient, subject: Subject) -> None:
    subject.data = subject.data or subject.rng.randbytes(SMALL)
    await client.put_into(subject.cap, "new", subject.data)


async def _rename(client: MutableClient, subject: Subject) -> None:
    subject.children["renamed"] = subject.children.pop("child0")
    await client.rename(subject.cap, "child0", "renamed")


async def _unlink(client: MutableClient, subject: Subject) -> None:
    del subject.children["child0"]
    await client.unlink(subject.cap, "child0")


async def _overwrite(client: MutableClient, subject: Subject) -> None:
    subject.data = subject.rng.randbytes(SMALL)
    await client.overwrite(subject.cap, subject.data)


async def _update(client: MutableClient, subject: Subject) -> None:
    offset, new = LARGE // 2, subject.rng.randbytes(SMALL)
    subject.data = subject.data[:offset] + new + subject.data[offset + SMALL :]
    await client.update(subject.cap, offset, new)


async def _list(client: MutableClient, subject: Subject) -> None:
    subject.made.append(json.dumps(await client.list(subject.cap)))


async def _get(client: MutableClient, subject: Subject) -> None:
    assert subject.sink is not None
    await client.get(str(cast(Any, parse_cap(subject.cap)).readonly()), subject.sink)


def _of_directory(verb: str, what: str, work: Work, **more: Any) -> Operation:
    return Operation(verb, what, Subject.directory, work, Subject.check_children, **more)


CREATE = Operation("create", "200 B", Subject.nothing, _create, Subject.check_made, times=CREATED)
LINK = _of_directory("link", "a child", _link)
RENAME = _of_directory("rename", "a child", _rename)
OVERWRITE = Operation("overwrite", "200 B", Subject.file, _overwrite, Subject.check_content)
LIST = Operation("list", "a directory", Subject.directory, _list, Subject.check_listed)
PUT_INTO = Operation("put", "200 B into a directory", Subject.directory, _put, Subject.check_put)
OPERATIONS = (
    CREATE,
    Operation("mkdir", "empty", Subject.nothing, _mkdir, Subject.check_directories, times=CREATED),
    LINK,
    PUT_INTO,
    RENAME,
    _of_directory("unlink", "a child", _unlink),
    OVERWRITE,
    attrs.evolve(OVERWRITE, what="200 B, warm", before=(_overwrite,)),
    LIST,
    Operation("update", "10 MB of MDMF", Subject.large_file, _update, Subject.check_content),
    Operation("get", "10 MB of MDMF", Subject.large_file, _get, Subject.check_got),
)
TINY = (CREATE, LINK, PUT_INTO, RENAME, OVERWRITE, LIST)
