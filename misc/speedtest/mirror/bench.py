"""
What all measurements share: archives, servers behind a link, directories that are empty again, and lines.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import attrs

from misc.speedtest.mirror.archive import LARGE, SMALL, TINY, Archive, Package, Shape, make_archive
from misc.speedtest.mirror.authority import Certificate, make_certificate
from misc.speedtest.mirror.runs import Run, run, verified
from misc.speedtest.mirror.tools import Call, Task, Tool
from misc.speedtest.mirror.webserver import Behaviour, WebServer
from misc.speedtest.processes import LOOPBACK, first_line, running


@attrs.define
class Bench:
    """
    Attributes:
        scratch: on a file system in memory.
        environment: what a figure depends on besides; part of every line.
        beside: another version, which is then the only tool that is compared; None: all others are.
    """

    scratch: Path
    rng: random.Random
    rounds: int
    tiny: bool
    environment: Mapping[str, Any]
    beside: Tool | None = None
    lines: list[dict[str, Any]] = attrs.Factory(list)
    _archives: dict[str, Archive] = attrs.Factory(dict)
    _numbers: Iterator[int] = attrs.Factory(count)

    @property
    def small(self) -> Archive:
        return self.archive(TINY if self.tiny else SMALL)

    @property
    def large(self) -> Archive:
        return self.archive(TINY if self.tiny else LARGE)

    def archive(self, shape: Shape) -> Archive:
        """Return an archive, made when it is first needed."""
        made = self._archives.get(shape.name)
        if made is None:
            made = make_archive(self.scratch / shape.name, shape, self.rng)
            self._archives[shape.name] = made
        return made

    def place(self) -> Path:
        """Return a directory that was never used."""
        path = self.scratch / f"work{next(self._numbers)}"
        path.mkdir()
        return path

    @contextmanager
    def server(
        self,
        root: Path,
        behaviour: Behaviour | None = None,
        certificate: Certificate | None = None,
    ) -> Iterator[WebServer]:
        """Run a web server."""
        place = self.scratch / f"nginx{next(self._numbers)}"
        try:
            with WebServer(root, place, behaviour, certificate) as server:
                yield server
        finally:
            shutil.rmtree(place, ignore_errors=True)

    @contextmanager
    def behind_link(
        self, servers: Sequence[WebServer], rtt_ms: float, *shape: str
    ) -> Iterator[list[str]]:
        """Put servers behind one link; yields HOST:PORT of each. ``shape``: options of ``relay``."""
        if not rtt_ms:
            yield [each.address for each in servers]
            return
        command = [sys.executable, "-m", "misc.speedtest.mirror.relay", str(rtt_ms / 1000)]
        with running([*command, *(each.address for each in servers), *shape]) as relay:
            yield [f"{LOOPBACK}:{port}" for port in json.loads(first_line(relay))]

    @contextmanager
    def mirrors(
        self,
        archive: Archive,
        rtt_ms: float,
        count: int = 1,
        tls: bool = False,
        shape: Sequence[str] = (),
    ) -> Iterator[tuple[list[str], Path | None]]:
        """Serve an archive on so many ports; yields URLs, and the authority to trust."""
        with ExitStack() as stack:
            certificate = make_certificate(self.scratch / "tls") if tls else None
            servers = [
                stack.enter_context(self.server(archive.root, None, certificate))
                for _ in range(count)
            ]
            addresses = stack.enter_context(self.behind_link(servers, rtt_ms, *shape))
            scheme = "https" if tls else "http"
            urls = [f"{scheme}://{address}/" for address in addresses]
            yield urls, None if certificate is None else certificate.authority

    def fetch(
        self,
        tool: Tool,
        urls: Sequence[str],
        archive: Archive,
        authority: Path | None = None,
    ) -> Run:
        """Have a tool clone an archive into an empty directory; all files are looked at afterwards."""
        place = self.place()
        try:
            task = Task(urls, archive.packages, archive.list_path, place, authority)
            return self.measured(tool.prepare(task), place, archive.packages)
        finally:
            shutil.rmtree(place)

    def measured(self, call: Call, place: Path, packages: Sequence[Package], **options: Any) -> Run:
        """Run a call, and look at all files."""
        return verified(run(call, place / "log", **options), packages, call.tree)

    def tell(self, what: str, **figures: Any) -> None:
        """Print one line of JSON."""
        line = {"what": what, **figures}
        self.lines.append(line)
        print(json.dumps({**line, **self.environment}), flush=True)
