"""``mirror list`` and ``mirror verify`` as processes: without Twisted while all goes well."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from io import BytesIO, StringIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from misc.command import environment
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.startup.lazy_modules import LAZY
from tests.cli.test_imports import COMMAND, modules
from tests.mirror.test_sprint import Server, ok

INTERRUPTED = "pipegrid: interrupted; the same command can be run again\n"
REACTOR = "twisted.internet.reactor"


class ShortcutTests(SynchronousTestCase):
    """With servers of their own."""

    def setUp(self) -> None:
        rng = random.Random(1)
        self.files = {f"pool/{n % 3}/file{n}": rng.randbytes(n * n * 90) for n in range(40)}
        self.list = Path(self.mktemp())
        self.list.write_text(
            "".join(
                f"{sha256(data).hexdigest()} {len(data)} {path}\n"
                for path, data in self.files.items()
            )
        )
        self.dest = Path(self.mktemp())
        self.server = Server(self.files)
        self.addCleanup(self.server.close)

    def found(self) -> dict[str, bytes]:
        """What is there."""
        return {
            str(path.relative_to(self.dest)): path.read_bytes()
            for path in self.dest.rglob("*")
            if path.is_file() and ".pipegrid-mirror" not in path.parts
        }

    def mirror(self, *options: str) -> tuple[dict[str, Any], set[str]]:
        """Run ``mirror list``; returns what it says, and what it loaded."""
        arguments = ("--json", "mirror", "list", str(self.list), str(self.dest))
        out, loaded = modules(COMMAND, *arguments, "--from", self.server.url, *options)
        return json.loads(out), loaded

    def test_nothing_of_twisted(self) -> None:
        """A clone, a second run that removes what is not wanted, and a look at all of it."""
        said, loaded = self.mirror()
        self.assertEqual(self.found(), self.files)
        self.assertEqual((said["fetched"], said["retries"]), (40, 0))
        self.assertEqual({name for name in loaded if name.startswith("twisted")} - {*LAZY}, set())
        (self.dest / "other").write_text("not wanted")
        said, loaded = self.mirror("--delete")
        self.assertEqual((said["present"], said["removed"]), (40, 1))
        self.assertNotIn(REACTOR, loaded)
        out, loaded = modules(COMMAND, "--json", "mirror", "verify", str(self.dest), "--paranoid")
        self.assertEqual(json.loads(out)["right"], 40)
        self.assertNotIn(REACTOR, loaded)

    def test_a_glance_loads_little(self) -> None:
        """To see that all is as it was takes nothing that is slow to load, in JSON neither."""
        self.mirror()
        command = [sys.executable, "-X", "importtime", "-m", "pipegrid.cli", "--json"]
        for known in (False, True):  # the first look finds out how the files look
            done = subprocess.run(
                [*command, "mirror", "verify", str(self.dest.absolute())],
                env=environment(),
                capture_output=True,
                text=True,
                timeout=60,
            )
            self.assertEqual(json.loads(done.stdout)["right"], 40)
            loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
            slow = {"ctypes", "hashlib", "json", "re", "threading", "typing"} & loaded
            self.assertEqual(slow, set() if known else {"re"})
            more = {"enum", "signal", "pipegrid.cli.console", "pipegrid.mirror.verify"}
            self.assertEqual(more & loaded, set() if known else more)

    def test_several_processes(self) -> None:
        """``--jobs`` fetches the same, and says the same; what there is no point in sharing, one does."""
        self.files |= {f"pool/more/{n}": b"%d" % n for n in range(160)}
        self.server.files = self.files
        self.list.write_text(
            "".join(
                f"{sha256(data).hexdigest()} {len(data)} {path}\n"
                for path, data in self.files.items()
            )
        )
        said, _ = self.mirror("--jobs", "2")
        self.assertEqual(self.found(), self.files)
        self.assertEqual((said["fetched"], said["retries"], said["failed"]), (200, 0, 0))
        self.assertEqual(sorted(self.server.asked), sorted(self.files))
        out, _ = modules(COMMAND, "--json", "mirror", "verify", str(self.dest))
        self.assertEqual(json.loads(out)["right"], 200)

    def test_a_list_that_changes(self) -> None:
        """Nothing is deleted for a list that is written while it is read; that is what it wants by then."""
        from pipegrid.cli.console import Console
        from pipegrid.cli.mirror_listed_files import ListRun
        from pipegrid.cli.mirror_options import MirrorOptions
        from pipegrid.errors import SourceError

        self.mirror()
        text = self.list.read_bytes()
        fetching = MirrorOptions(urls=(self.server.url,), delete=True)
        run = ListRun(str(self.list), str(self.dest), fetching)

        def changing() -> bool:
            self.list.write_bytes(text[:500])
            return False

        with self.assertRaisesRegex(SourceError, "was changed while it was read"):
            run.run_on_epoll(Console(BytesIO(), BytesIO(), StringIO()), changing)
        self.assertEqual(self.found(), self.files)

    def test_stopped_while_looking(self) -> None:
        """A run that was told to stop while it looked at what is there is not one that was complete."""
        from pipegrid.cli.console import Console
        from pipegrid.cli.error_report import Interrupted
        from pipegrid.cli.mirror_listed_files import ListRun
        from pipegrid.cli.mirror_options import MirrorOptions

        self.mirror()
        manifest = self.dest / ".pipegrid-mirror/manifest"
        before = manifest.read_bytes()
        urls = (self.server.url,)
        for jobs in (1, 2):
            fetching = MirrorOptions(urls=urls, durability="none")
            looks = iter([False, *[True] * 1000])
            run = ListRun(str(self.list), str(self.dest), fetching, jobs)
            console = Console(None, None, StringIO())
            with self.assertRaises(Interrupted):
                run.run_on_epoll(console, lambda looks=looks: next(looks))  # type: ignore[misc]
            self.assertEqual(manifest.read_bytes(), before)

    def test_the_rest(self) -> None:
        """What a sprint gives up is brought to its end, and counted as one run."""
        asked = 0

        def chunked(path: str, _: int) -> bytes:
            data = self.files[path]
            chunk = b"%x\r\n%s\r\n" % (len(data), data) if data else b""
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            return head + chunk + b"0\r\n\r\n"

        def busy(path: str, _: int) -> bytes:
            nonlocal asked
            asked += 1
            if asked == 12:
                return b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"
            return ok(self.files[path])

        answers: tuple[Callable[[str, int], bytes], ...] = (chunked, busy)
        for answer in answers:
            self.dest = Path(self.mktemp())
            self.server.answer = answer
            said, loaded = self.mirror()
            self.assertIn(REACTOR, loaded)
            self.assertEqual(self.found(), self.files)
            self.assertEqual((said["files"], said["fetched"], said["failed"]), (40, 40, 0))
            self.assertEqual(said["present"], 0)

    def test_what_cannot_be_had(self) -> None:
        """It is named, with the exit status 1, and nothing is noted as complete."""
        self.server.answer = lambda path, _: (
            b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"
            if path.endswith("/file7")
            else ok(self.files[path])
        )
        done = self.run_process("mirror", "list", str(self.list), str(self.dest))
        self.assertEqual(done.returncode, 1)
        self.assertIn("pool/1/file7 could not be fetched", done.stderr)
        self.assertIn("it answers 404", done.stderr)
        self.assertEqual(len(self.found()), 39)
        done = self.run_process("mirror", "verify", str(self.dest), urls=False)
        self.assertIn("no run to it was complete yet", done.stderr)

    def run_process(self, *arguments: str, urls: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command."""
        given = ("--from", self.server.url) if urls else ()
        return subprocess.run(
            [sys.executable, "-m", "pipegrid.cli", *arguments, *given],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def test_interrupted(self) -> None:
        """Being told to end leaves no part of a file, and one sentence; the next run goes on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self.dest = Path(self.mktemp())
            pids: SimpleQueue[int] = SimpleQueue()

            def answer(path: str, count: int, number: int = number, pids: Any = pids) -> bytes:
                if count == 3:
                    os.kill(pids.get(), number)
                data = ok(self.files[path])
                return data if count < 3 else data[: len(data) // 2]

            self.server.answer = answer
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pipegrid.cli", "mirror", "list", str(self.list)),
                    *(str(self.dest), "--from", self.server.url, "--connections", "1"),
                ],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            pids.put(process.pid)
            _, errors = process.communicate(timeout=60)
            self.assertEqual((process.returncode, errors), (130, INTERRUPTED))
            self.assertEqual(os.listdir(self.dest / ".pipegrid-mirror/incoming"), [])
            self.server.answer = lambda path, _: ok(self.files[path])
            said, _ = self.mirror()
            self.assertEqual(self.found(), self.files)
            self.assertEqual(said["failed"], 0)
