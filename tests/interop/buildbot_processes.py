"""
A real Buildbot master and worker on loopback, with the configuration that ``misc/buildbot`` offers.

    with Buildbot(Path("scratch"), speedtest="pipegrid speedtest") as buildbot:
        build = buildbot.build("speedtest-installed")

Everything that is known of the master is asked through its REST interface.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = ROOT / "misc" / "buildbot" / "master.cfg"
PATIENCE_S = 120.0
"""For things that take a second; so a machine may well be a hundred times slower."""
_POLL_S = 0.2
_ATTEMPTS = 5


class Buildbot:
    """
    A master and its worker, which run while this is entered.

    Args:
        scratch: an existing directory for both.
        speedtest: the command that the builder ``speedtest-installed`` runs.

    Attributes:
        url: of the master's pages, with a slash at the end.
    """

    def __init__(self, scratch: Path, speedtest: str) -> None:
        self._scratch = scratch
        www_port, worker_port = _free_ports(2)
        self.url = f"http://127.0.0.1:{www_port}/"
        self._worker_port = worker_port
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._environment = os.environ | {
            "PIPEGRID_REPOSITORY": str(ROOT),
            "PIPEGRID_SPEEDTEST": speedtest,
            "PIPEGRID_WWW_PORT": str(www_port),
            "PIPEGRID_WORKER_PORT": str(worker_port),
            "PYTHONPATH": path.rstrip(os.pathsep),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Buildbot:
        with self._stack:
            self._call("buildbot", "create-master", "master")
            (self._scratch / "master" / "master.cfg").symlink_to(CONFIGURATION)
            self._start("buildbot", "start", "--nodaemon", "master")
            self.wait("the master's pages", lambda: self._answers("workers"))
            password = (self._scratch / "master" / "worker.password").read_text()
            place = f"127.0.0.1:{self._worker_port}"
            self._call("buildbot-worker", "create-worker", "worker", place, "worker", password)
            self._start("buildbot-worker", "start", "--nodaemon", "worker")
            self.wait("the worker", self._is_connected)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Return what the REST interface says, below ``api/v2``."""
        parameters = f"?{urllib.parse.urlencode(query)}" if query else ""
        found = json.loads(self.raw(f"{path}{parameters}"))
        assert isinstance(found, dict)
        return found

    def raw(self, path: str) -> bytes:
        """Return the body of an answer; one that is cut off, as happens now and then, is asked for again."""
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(http.client.HTTPException, ConnectionResetError):
                return self._raw(path)
        return self._raw(path)

    def _raw(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}api/v2/{path}", timeout=PATIENCE_S) as answer:
            return bytes(answer.read())

    def force(self, builder: str, **properties: Any) -> int:
        """Force a build; returns its id as soon as it has begun."""
        [found] = self.get("builders", name=builder)["builders"]
        parameters = {"builderid": found["builderid"], "owner": "the test", **properties}
        request = urllib.request.Request(
            f"{self.url}api/v2/forceschedulers/force",
            json.dumps(
                {"jsonrpc": "2.0", "method": "force", "id": 1, "params": parameters}
            ).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            _, requests = json.loads(answer.read())["result"]
        [number] = requests.values()

        def begun() -> int | None:
            builds = self.get("builds", buildrequestid=str(number))["builds"]
            return int(builds[0]["buildid"]) if builds else None

        return self.wait(f"build of {builder}", begun)

    def finished(self, build: int) -> dict[str, Any]:
        """Wait for the end of a build and return what the master says of it."""

        def done() -> dict[str, Any] | None:
            [found] = self.get(f"builds/{build}")["builds"]
            return found if found["complete"] else None

        return self.wait(f"the end of build {build}", done)

    def build(self, builder: str, **properties: Any) -> dict[str, Any]:
        """Force a build and wait for its end."""
        return self.finished(self.force(builder, **properties))

    def properties(self, build: dict[str, Any]) -> dict[str, Any]:
        """Return the properties of a build, by name."""
        [found] = self.get(f"builds/{build['buildid']}/properties")["properties"]
        return {name: value for name, (value, _source) in found.items()}

    def wait(self, what: str, look: Callable[[], T | None]) -> T:
        """Look until there is something, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = look()
            if found:
                return found
            gone = any(process.poll() is not None for process in self._processes)
            if gone or time.monotonic() > deadline:
                raise AssertionError(
                    f"no sign of {what} after {PATIENCE_S:g} s or less; {self._log()}"
                )
            time.sleep(_POLL_S)

    def _answers(self, path: str) -> bool:
        try:
            self.raw(path)
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _is_connected(self) -> bool:
        return any(worker["connected_to"] for worker in self.get("workers")["workers"])

    def _call(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [_script(program), *arguments],
            cwd=self._scratch,
            env=self._environment,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=PATIENCE_S,
        )

    def _start(self, program: str, *arguments: str) -> None:
        log = self._stack.enter_context((self._scratch / f"{program}.out").open("wb"))
        process = subprocess.Popen(
            [_script(program), *arguments],
            cwd=self._scratch,
            env=self._environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

        self._processes.append(process)

        def stop() -> None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        self._stack.callback(stop)

    def _log(self) -> str:
        logs = [*self._scratch.glob("*/twistd.log"), *self._scratch.glob("*.out")]
        texts = [path.read_text("utf-8", "replace")[-3000:] for path in logs]
        return "\n".join(["the logs end with", *texts])


def _script(program: str) -> str:
    path = Path(sys.executable).with_name(program)
    if not path.exists():
        raise AssertionError(f"{path} is missing; install pipegrid[buildbot] beside this Python")
    return str(path)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def program(module: str, *arguments: str) -> str:
    """Return the command line of a module of these tests."""
    return shlex.join([sys.executable, "-m", module, *arguments])
