"""``pipegrid mirror`` on a real reactor, from web servers on this machine."""

from __future__ import annotations

import errno
import io
import json
import os
import random
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase
from twisted.web.server import Site
from twisted.web.static import File

from pipegrid.cli.command_grammar import start
from pipegrid.cli.console import Console
from pipegrid.mirror.archive_file import MirrorError
from pipegrid.mirror.destination import Destination, ReadOnlyDestination
from tests.mirror.unchanged import look_of, make_read_only


class MirrorCase(TestCase):
    """An archive, a list of it, and web servers for it."""

    def setUp(self) -> None:
        self.archive = Path(self.mktemp())
        self.dest = Path(self.mktemp())
        rng = random.Random(1)
        self.files = {
            f"pool/{letter}/{letter} {number}.deb": rng.randbytes(rng.randrange(9000))
            for letter in "abc"
            for number in range(20)
        }
        self.files["pool/large"] = rng.randbytes(3_000_000)
        for path, data in self.files.items():
            (self.archive / path).parent.mkdir(parents=True, exist_ok=True)
            (self.archive / path).write_bytes(data)
        self.list = Path(self.mktemp())
        self.write_list(self.files)
        self.urls = [self.serve(self.archive) for _ in range(2)]

    def serve(self, directory: Path, kind: type[File] = File) -> str:
        """Start a web server; returns its URL."""
        site = Site(kind(str(directory)))
        port: Any = reactor.listenTCP(0, site, interface="127.0.0.1")  # type: ignore[arg-type]
        self.addCleanup(port.stopListening)
        return f"http://127.0.0.1:{port.getHost().port}/"

    def write_list(self, files: dict[str, bytes]) -> None:
        """Name these in the list."""
        self.list.write_text(
            "".join(
                f"{sha256(data).hexdigest()}  {len(data)} {path}\n" for path, data in files.items()
            )
        )

    def found(self) -> dict[str, bytes]:
        """What is there."""
        return {
            str(path.relative_to(self.dest)): path.read_bytes()
            for path in self.dest.rglob("*")
            if path.is_file() and ".pipegrid-mirror" not in path.parts
        }

    async def run_command(self, *arguments: str) -> tuple[int, str, str]:
        """Run it; returns status, stdout, stderr."""
        out, err = io.BytesIO(), io.StringIO()
        console = Console(io.BytesIO(), out, err)
        status = await start(["mirror", *arguments], console, reactor)
        return status, out.getvalue().decode(), err.getvalue()

    def mirror_list(self, *options: str) -> Any:
        """Run ``mirror list``."""
        given = [each for url in self.urls for each in ("--from", url)]
        return self.run_command("list", str(self.list), str(self.dest), *given, *options)


class MirrorTests(MirrorCase):
    """The command line."""

    async def _test_list_and_verify(self) -> None:
        status, out, err = await self.mirror_list()
        self.assertEqual((status, self.found()), (0, self.files))
        self.assertEqual(out.count("\n"), 1)
        self.assertIn(f"{len(self.files)} files", out)
        for url in self.urls:
            self.assertIn(url, err)
        status, out, _ = await self.mirror_list("--json")
        told = json.loads(out)
        self.assertEqual((status, told["fetched"], told["present"]), (0, 0, len(self.files)))
        status, out, _ = await self.run_command("verify", str(self.dest))
        self.assertEqual(status, 0)
        self.files["pool/\x9b2J"] = b"with what some terminals take for an order"
        (self.archive / "pool/\x9b2J").write_bytes(self.files["pool/\x9b2J"])
        self.write_list(self.files)
        self.assertEqual((await self.mirror_list())[0], 0)
        (self.dest / "pool/\x9b2J").unlink()
        status, _, err = await self.run_command("verify", str(self.dest))
        self.assertEqual((status, err.count("\x9b")), (5, 0))
        self.assertIn("pool/\\x9b2J: it is missing", err)
        self.assertEqual((await self.mirror_list())[0], 0)
        path = min(self.files)
        (self.dest / path).write_bytes(b"?")
        status, out, err = await self.run_command("verify", str(self.dest), "-q")
        self.assertEqual(status, 5)
        self.assertIn(path, err)
        self.assertIn(f"{len(self.files) - 1} of {len(self.files)}", out)

    async def _test_one_of_all(self) -> None:
        self.list.write_text(self.list.read_text().splitlines(keepends=True)[0])
        status, out, _ = await self.mirror_list()
        self.assertEqual((status, out.partition(",")[0]), (0, "1 file"))
        self.assertIn("; 0 were present, 0 failed", out)
        status, out, _ = await self.mirror_list()
        self.assertIn("0 files, 0 bytes fetched; 1 was present, 0 failed", out)

    def test_one_of_all(self) -> Deferred[None]:
        """One is told as one."""
        return Deferred.fromCoroutine(self._test_one_of_all())

    def test_list_and_verify(self) -> Deferred[None]:
        """Everything comes, once; what is wrong afterwards is named, with status 5."""
        return Deferred.fromCoroutine(self._test_list_and_verify())

    async def _test_delete(self) -> None:
        await self.mirror_list()
        kept = dict(list(self.files.items())[:5])
        self.write_list(kept)
        before = self.found()
        status, out, _ = await self.mirror_list("--delete", "--dry-run", "--json")
        self.assertEqual((status, self.found()), (0, before))
        self.assertEqual(json.loads(out)["removed"], len(self.files) - 5)
        status, out, _ = await self.mirror_list("--delete")
        self.assertEqual((status, self.found()), (0, kept))
        self.assertNotIn("b", [path.name for path in (self.dest / "pool").iterdir()])

    def test_delete(self) -> Deferred[None]:
        """What is not wanted goes, and empty directories with it; a dry run only says so."""
        return Deferred.fromCoroutine(self._test_delete())

    async def _test_deleting_what_is_not_ours(self) -> None:
        thesis = self.dest / "work/thesis"
        thesis.parent.mkdir(parents=True)
        thesis.write_bytes(b"all there is")
        origin = ("--from", self.urls[0], "--delete")
        for words in (
            ("list", str(self.list), str(self.dest), *origin),
            ("debian", str(self.dest), *origin, "--suite", "sid", "--allow-unsigned"),
            ("rpm", str(self.dest), *origin, "--allow-unsigned"),
            ("rpm", str(self.dest), "--from-grid", "URI:DIR2-LIT:", "--delete"),
        ):
            status, _, err = await self.run_command(*words)
            self.assertEqual(status, 2, err)
            self.assertIn("is not a mirror yet, and --delete would remove", err)
            self.assertEqual(os.listdir(self.dest), ["work"])
        thesis.rename(self.dest / "work/link")  # nor a link, nor what it leads to
        thesis.symlink_to("link")
        (self.dest / "work/link").unlink()
        self.assertEqual((await self.mirror_list("--delete"))[0], 2)
        # Directories without files, as on a new disk, are no reason; nor is who says that it belongs here.
        thesis.unlink()
        self.assertEqual((await self.mirror_list("--delete"))[0], 0)
        thesis.parent.mkdir(exist_ok=True)
        thesis.write_bytes(b"all there is")
        self.assertEqual((await self.mirror_list())[0], 0)
        self.assertTrue(thesis.exists())
        self.assertEqual((await self.mirror_list("--delete"))[0], 0)
        self.assertEqual(self.found(), self.files)

    def test_deleting_what_is_not_ours(self) -> Deferred[None]:
        """A directory that was no mirror is not emptied for a slip in its name."""
        return Deferred.fromCoroutine(self._test_deleting_what_is_not_ours())

    async def _test_looking_at_what_is_not_ours(self) -> None:
        self.dest.mkdir()
        (self.dest / "thesis").write_bytes(b"all there is")
        status, out, err = await self.run_command("verify", str(self.dest))
        self.assertEqual((status, out), (1, ""))
        self.assertIn("no run to it was complete", err)
        self.assertEqual(os.listdir(self.dest), ["thesis"])
        status, out, _ = await self.mirror_list("--delete", "--dry-run", "--json")
        self.assertEqual((status, json.loads(out)["removed"]), (0, 1))
        status, _, err = await self.mirror_list("--delete")
        self.assertEqual(status, 2, err)
        self.assertIn("is not a mirror yet, and --delete would remove", err)
        self.assertEqual(self.found(), {"thesis": b"all there is"})

    def test_looking_at_what_is_not_ours(self) -> Deferred[None]:
        """Does not make a mirror of a directory, which the next run could empty then."""
        return Deferred.fromCoroutine(self._test_looking_at_what_is_not_ours())

    async def _test_going_on_with_what_was_cut_off(self) -> None:
        (self.archive / "pool/large").rename(self.archive / "elsewhere")
        self.assertEqual((await self.mirror_list("--delete"))[0], 1)
        (self.archive / "elsewhere").rename(self.archive / "pool/large")
        (self.dest / "old").write_bytes(b"old")
        self.assertEqual((await self.mirror_list("--delete"))[0], 0)
        self.assertEqual(self.found(), self.files)

    def test_going_on_with_what_was_cut_off(self) -> Deferred[None]:
        """A run that was not complete has made a mirror of its destination."""
        return Deferred.fromCoroutine(self._test_going_on_with_what_was_cut_off())

    async def _test_a_list_that_changes(self) -> None:
        await self.mirror_list()
        (self.dest / min(self.files)).unlink()
        text = self.list.read_bytes()

        class Changing(File):
            """While it is asked for a file, the list is written anew, and not complete yet."""

            def render_GET(changing, request: Any) -> Any:
                self.list.write_bytes(text[:200])
                return File.render_GET(changing, request)

        self.urls = [self.serve(self.archive, Changing)]
        status, _, err = await self.mirror_list("--delete")
        self.assertEqual((status, self.found()), (1, self.files))
        self.assertIn("was changed while it was read, so nothing was deleted", err)

    def test_a_list_that_changes(self) -> Deferred[None]:
        """Nothing is deleted for a list that is written while it is read."""
        return Deferred.fromCoroutine(self._test_a_list_that_changes())

    async def _test_a_list_that_is_read_once(self) -> None:
        ours, theirs = os.pipe()
        os.write(theirs, self.list.read_bytes()[:200])
        os.close(theirs)
        self.addCleanup(os.close, ours)
        given = (f"/dev/fd/{ours}", str(self.dest), "--from", self.urls[0])
        status, _, err = await self.run_command("list", *given)
        self.assertEqual(status, 2)
        self.assertIn("can be read only once, and a list is read several times", err)

    def test_a_list_that_is_read_once(self) -> Deferred[None]:
        """A pipe is none; that is said of it, and not of the destination."""
        return Deferred.fromCoroutine(self._test_a_list_that_is_read_once())

    async def _test_a_list_of_nothing(self) -> None:
        await self.mirror_list()
        for text in ("", "# made by a job that failed\n"):
            self.list.write_text(text)
            status, _, err = await self.mirror_list("--delete")
            self.assertEqual((status, self.found()), (2, self.files))
            self.assertIn("names no files, and --delete would remove everything", err)
            self.assertEqual((await self.mirror_list())[0], 0)

    def test_a_list_of_nothing(self) -> Deferred[None]:
        """Does not empty a mirror: what made it has failed."""
        return Deferred.fromCoroutine(self._test_a_list_of_nothing())

    async def _test_dry_run(self) -> None:
        status, out, _ = await self.mirror_list("--dry-run")
        self.assertEqual((status, self.found()), (0, {}))
        self.assertIn(f"{len(self.files)} files", out)
        self.assertIn("would be fetched", out)
        self.assertEqual(look_of(self.dest), {})
        # Of a mirror not even what has to be hashed, or lies there unfinished, is as otherwise.
        await self.mirror_list()
        changed, missing, *_ = self.files
        (self.dest / changed).touch()
        (self.dest / missing).unlink()
        (self.dest / ".pipegrid-mirror/incoming/half").write_bytes(b"half")
        before = look_of(self.dest)
        status, out, _ = await self.mirror_list("--dry-run", "--delete", "--json")
        told = json.loads(out)
        self.assertEqual((status, told["fetched"], told["present"]), (0, 1, len(self.files) - 1))
        self.assertEqual(look_of(self.dest), before)
        with closing(Destination(str(self.dest))):
            status, _, err = await self.mirror_list("--dry-run")
        self.assertEqual(status, 1)
        self.assertIn("another process is mirroring", err)

    def test_dry_run(self) -> Deferred[None]:
        """Nothing is fetched, made, or noted, and nobody else is mirroring meanwhile."""
        return Deferred.fromCoroutine(self._test_dry_run())

    async def _test_verify_without_writing(self, code: int) -> None:
        await self.mirror_list()
        changed, wrong, *_ = self.files
        os.utime(self.dest / changed, ns=(1, 1))
        status, out, err = await self.run_command("verify", str(self.dest))
        self.assertEqual((status, err), (0, ""))
        os.utime(self.dest / changed, ns=(2, 2))
        path = self.dest / wrong
        path.write_bytes(bytes(path.stat().st_size))
        before = look_of(self.dest)
        make_read_only(self, code)
        self.patch(os, "cpu_count", lambda: 1)
        for _ in range(2):
            status, out, err = await self.run_command("verify", str(self.dest), "--json")
            told = json.loads(out)
            found = (told["right"], told["wrong"], told["unnoted"])
            self.assertEqual((status, found), (5, (len(self.files) - 1, 1, 2)), err)
            self.assertIn("the verified hashes of 2 files cannot be recorded", err)
            self.assertEqual(look_of(self.dest), before)

    def test_verify_on_a_disk_that_is_read_only(self) -> Deferred[None]:
        """All is looked at, nothing noted, and one sentence says so."""
        return Deferred.fromCoroutine(self._test_verify_without_writing(errno.EROFS))

    def test_verify_of_another_users_mirror(self) -> Deferred[None]:
        """The same."""
        return Deferred.fromCoroutine(self._test_verify_without_writing(errno.EACCES))

    async def _test_verify_beside_others(self) -> None:
        await self.mirror_list()
        with closing(ReadOnlyDestination(str(self.dest))):
            error = self.assertRaises(MirrorError, Destination, str(self.dest))
            self.assertIn("or checking it; wait until it has finished", str(error))
        make_read_only(self)
        with closing(ReadOnlyDestination(str(self.dest))):
            status, _, err = await self.run_command("verify", str(self.dest))
            self.assertEqual((status, err), (0, ""))  # nothing had to be hashed

    def test_verify_beside_others(self) -> Deferred[None]:
        """Any number of processes may look at a mirror that none of them may write to; who may, waits."""
        return Deferred.fromCoroutine(self._test_verify_beside_others())

    async def _test_failures(self) -> None:
        (self.archive / "pool/large").unlink()
        await self.mirror_list()
        status, out, err = await self.mirror_list("--delete")
        self.assertEqual(status, 1)
        self.assertIn("1 failed", out)
        self.assertIn("pool/large could not be fetched", err)
        self.assertEqual(err.count("it answers 404"), 2)
        # What a cron job mails: nothing but what went wrong.
        status, _, err = await self.mirror_list("-q")
        self.assertEqual((status, err.count("\n")), (1, 1))
        self.assertIn("pool/large could not be fetched", err)
        # Without a complete run nothing is removed, and nothing is promised.
        (self.dest / "extra").write_bytes(b"x")
        await self.mirror_list("--delete")
        self.assertIn("extra", self.found())
        status, _, err = await self.run_command("verify", str(self.dest))
        self.assertEqual(status, 1)
        self.assertIn("no run to it was complete", err)

    def test_failures(self) -> Deferred[None]:
        """They are named with each mirror's reason; status 1; and nothing is removed then."""
        return Deferred.fromCoroutine(self._test_failures())

    async def _test_bad_input(self) -> None:
        for text, words in (
            ("nonsense\n", "line 1"),
            (f"{'0' * 64} 1 ../x\n", "leads out of the mirror"),
            (f"{'0' * 64} 1 /x\n", "is absolute"),
        ):
            self.list.write_text(text)
            status, out, err = await self.mirror_list()
            self.assertEqual((status, out, err.count("\n")), (1, "", 1), err)
            self.assertIn(words, err)
        self.write_list(self.files)
        for arguments, words in (
            (["list", "nowhere", str(self.dest), "--from", self.urls[0]], "cannot read nowhere"),
            (["list", str(self.list), str(self.list), "--from", self.urls[0]], "File exists"),
            (["list", str(self.list), str(self.dest), "--from", "ftp://x/"], "not the URL"),
            (["list", str(self.list), str(self.dest), "--from", "http://u:p@x/?q"], "no query"),
            (["list", str(self.list), str(self.dest)], "--from"),
            (["verify", "nowhere"], "nowhere"),
            (
                [
                    "list",
                    str(self.list),
                    str(self.dest),
                    "--from",
                    "http://x/",
                    "--limit-rate",
                    "x",
                ],
                "not a number of bytes per second",
            ),
        ):
            status, out, err = await self.run_command(*arguments)
            self.assertIn(status, (1, 2))
            self.assertEqual((out, err.count("\n")), ("", 1), err)
            self.assertIn(words, err)

    def test_bad_input(self) -> Deferred[None]:
        """One sentence each."""
        return Deferred.fromCoroutine(self._test_bad_input())
