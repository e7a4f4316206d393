"""
Through how many modules a put goes, from the command to the socket, and a get back?

A server runs as a process of its own. The real command stores a file of 60 kB there (1 of 1) and fetches it,
in a process that notes every call of a function of the package in the reactor's thread (``sys.setprofile``;
a coroutine that goes on counts as called, what runs while a module is loaded does not). Four walks:

* **put**: from the first call of the command's job to the first write to a socket that has 16 kB and more,
  the share's; **its answer**: from there to the end of the job;
* **get**: from the first call of the job to the first write to a socket after it, a request; **its answer**:
  from the first read from a socket of 16 kB and more to the end of the job.

A module is *entered* when a function of it is called by one of another module, or by the reactor. Counted:

* the **straight** way: the shortest chain of calls from the job to the write, or from the read to the job;
  and how many other ways lead from one module of it into another, back or past some (**beside** it);
* **all** modules that are entered until then, whatever for, and the ways into them beside the first of each:
  from how many other modules (**again**), not how often, so that neither servers nor segments count twice.

``errors``, ``core`` (formats), ``wire`` (messages), ``cli/startup/lazy_modules`` (loads modules) and
``reactor/process_settings`` (tells the time) are not counted, nor are those that older versions had for that.

    python -m misc.walk [--source DIR] [--list]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

SIZE = 60_000
LARGE = 16_000
HERE = Path(__file__).resolve().parent.parent
LEFT_OUT = (
    *("errors", "core/", "wire/", "version", "argument_checks"),
    *("grid/server_tracing", "cli/startup/lazy_modules", "reactor/process_settings"),
)


class Walk:
    """Who called whom, by module, until it is closed."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.ways: list[tuple[str, str]] = []
        self._seen: set[tuple[str, str]] = set()

    def step(self, caller: str, module: str) -> None:
        """A function was called."""
        if caller == module or (caller, module) in self._seen:
            return
        self._seen.add((caller, module))
        self.ways.append((caller, module))
        if module not in self.entered:
            self.entered.append(module)

    def told(self, begin: str, end: str) -> dict[str, Any]:
        """Return the counts; ``begin`` and ``end``: modules of the straight way, perhaps none."""
        modules = [module for module in self.entered if is_counted(module)]
        into = [way for way in self.ways if way[1] in modules and is_counted(way[0])]
        straight = chain(into, begin, end)
        steps = set(pairwise(straight))
        aside = [w for w in into if w[0] in straight and w[1] in straight and w not in steps]
        return {
            "straight": straight,
            "aside": aside,
            "again": len(into) - len(modules),
            "modules": modules,
            "ways": into,
        }


def is_counted(module: str) -> bool:
    """Return whether a module counts; see above."""
    return not module.startswith(LEFT_OUT) and not module.endswith("__init__")


def chain(ways: Sequence[tuple[str, str]], begin: str, end: str) -> list[str]:
    """Return the shortest chain of ways from one module to another, both included; empty: there is none."""
    before: dict[str, str | None] = {begin: None}
    ahead = [begin]
    for here in ahead:
        for caller, module in ways:
            if caller == here and module not in before:
                before[module] = here
                ahead.append(module)
    found: list[str] = []
    at: str | None = end if end in before else None
    while at is not None:
        found.append(at)
        at = before[at]
    return found[::-1]


class Tracer:
    """
    Notes the walks of one command.

    Args:
        command: ``put`` or ``get``.
    """

    def __init__(self, package: str, command: str) -> None:
        self._package = package + os.sep
        self._jobs = (f"cli/cmd_{command}", f"cli/cmd_{command}_cat")
        self._modules: dict[str, str | None] = {}
        self._thread = threading.get_ident()
        self._now: Walk | None = None
        self._command = command
        self.there = Walk()
        self.back = Walk()
        self.writer = ""

    def _module(self, frame: Any) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._modules:
            inside = name.startswith(self._package)
            self._modules[name] = (
                name.removeprefix(self._package).removesuffix(".py") if inside else None
            )
        return self._modules[name]

    def profile(self, frame: Any, event: str, _argument: object) -> None:
        """Take one event; see ``sys.setprofile``."""
        if event != "call" or frame.f_code.co_name == "<module>":
            return
        module = self._module(frame)
        if module is None:
            return
        if self._now is None and not self.there.entered:
            if module not in self._jobs or frame.f_code.co_name != "work":
                return
            self._now = self.there
        if self._now is None:
            return
        self._now.step(self._above(frame.f_back), module)

    def _above(self, frame: Any) -> str:
        """Return the innermost module of the package that a frame is of, or is called by."""
        while frame is not None and self._module(frame) is None:
            frame = frame.f_back
        module = None if frame is None else self._module(frame)
        # Who runs the reactor calls nobody.
        return (
            "the reactor" if module in (None, "cli/process", "cli/startup/process") else str(module)
        )

    def written(self, size: int) -> None:
        """So much was written to a socket."""
        if self._now is self.there and threading.get_ident() == self._thread:
            if self._command == "put" and size < LARGE:
                return
            self.writer = self._above(sys._getframe(1))
            self._now = self.back if self._command == "put" else None

    def read(self, size: int) -> None:
        """So much was read from one."""
        waits = self._command == "get" and self._now is None and self.there.entered
        if waits and size >= LARGE and not self.back.entered:
            self._now = self.back


def watch_sockets(tracer: Tracer) -> None:
    """Have the tracer told of what passes through sockets."""
    kind: Any = socket.socket
    plain: Any = kind.__mro__[1]

    def send(self: Any, data: Any, *rest: Any) -> int:
        tracer.written(len(data))
        return int(plain.send(self, data, *rest))

    def sendmsg(self: Any, buffers: Any, *rest: Any) -> int:
        pieces = list(buffers)
        tracer.written(sum(map(len, pieces)))
        return int(plain.sendmsg(self, pieces, *rest))

    def recv(self: Any, *arguments: Any) -> bytes:
        data: bytes = plain.recv(self, *arguments)
        tracer.read(len(data))
        return data

    def recv_into(self: Any, *arguments: Any) -> int:
        size = int(plain.recv_into(self, *arguments))
        tracer.read(size)
        return size

    kind.send, kind.sendmsg, kind.recv, kind.recv_into = send, sendmsg, recv, recv_into


def traced(source: str, command: str, arguments: Sequence[str], result: str) -> None:
    """In a process of its own: run the command and write down how it went."""
    sys.path.insert(0, source)
    import pipegrid.cli

    tracer = Tracer(os.path.join(source, "pipegrid"), command)
    watch_sockets(tracer)
    sys.setprofile(tracer.profile)
    sys.argv = ["pipegrid", *arguments]
    status: object = 0
    try:
        pipegrid.cli.main()
    except SystemExit as exit:
        status = exit.code
    finally:
        sys.setprofile(None)
    job = f"cli/cmd_{command}"
    first = next(filter(is_counted, tracer.back.entered), "")
    told = {
        "there": tracer.there.told(job, tracer.writer),
        "back": tracer.back.told(first, job),
        "status": status,
    }
    Path(result).write_text(json.dumps(told))


def walk(source: Path) -> dict[str, dict[str, Any]]:
    """Return the four walks of the package below a ``src`` directory."""
    from pipegrid.core.encoding_parameters import Params
    from pipegrid.speedtest.child_processes import FileEncoding, Servers

    found: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        Servers(1, encoding=FileEncoding(Params(1, 1), 1), scratch=Path(scratch)) as servers,
    ):
        content, copy = Path(scratch) / "content", Path(scratch) / "copy"
        content.write_bytes(os.urandom(SIZE))
        cap = ""
        for command in ("put", "get"):
            result = Path(scratch) / f"{command}.json"
            rest = ["--random-key", str(content)] if command == "put" else [cap, "-o", str(copy)]
            done = subprocess.run(
                [
                    *(sys.executable, __file__, "--traced", str(source), command, str(result)),
                    *("--", "-d", str(servers.client), command, *rest),
                ],
                capture_output=True,
                text=True,
                timeout=120,
            )
            if not result.is_file() or json.loads(result.read_text())["status"]:
                raise SystemExit(f"{command} failed: {done.stdout}{done.stderr}")
            cap = done.stdout.strip()
            told = json.loads(result.read_text())
            found[command] = told["there"]
            found[f"{command}, its answer"] = told["back"]
        assert copy.read_bytes() == content.read_bytes()
    return found


def main() -> None:
    """Print the walks."""
    if sys.argv[1:2] == ["--traced"]:
        traced(sys.argv[2], sys.argv[3], sys.argv[6:], sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--source", type=Path, default=HERE / "src", help="whose package is walked")
    parser.add_argument(
        "--list", action="store_true", help="name the modules, and the ways into them"
    )
    given = parser.parse_args()
    for name, each in walk(given.source.resolve()).items():
        straight, aside, modules = each["straight"], each["aside"], each["modules"]
        print(
            f"{name:16} straight: {len(straight):2} modules, {len(aside):2} ways beside;"
            f" all: {len(modules):2} modules, {each['again']:2} entered again"
        )
        if given.list:
            print(f"    {' > '.join(straight)}\n    {', '.join(map(' > '.join, aside))}")
            for entered in modules:
                callers = [caller for caller, module in each["ways"] if module == entered]
                print(f"    {entered:34} from {', '.join(callers)}")


if __name__ == "__main__":
    main()
