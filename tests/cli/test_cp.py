"""``cp``: as users meet it, in processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from pipegrid.storage.mutable.slot_file import DATA_OFFSET
from tests.cli.processes import ProcessTestCase, in_fresh_processes


class CopyTests(ProcessTestCase):
    """Whole commands, on a grid that the first of them makes."""

    def setUp(self) -> None:
        super().setUp()
        for name, content in (("one", "1" * 300), ("two", "2" * 400), ("d/a", "a"), ("d/e/b", "b")):
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        os.symlink("a", self.home / "d/link")
        self.cap, _ = self.run_command("alias", "create", "home")

    def listed(self, path: str = "home:") -> list[str]:
        """Return what ``ls -R`` shows."""
        return self.run_command("ls", "-R", path)[0].split()

    def refused(self, *arguments: str, said: str, status: int = 2) -> None:
        """Assert that a copy fails with one sentence."""
        out, err = self.run_command("cp", *arguments, status=status)
        self.assertEqual((out, err.count("pipegrid: ")), ("", 1), err)
        self.assertIn(said, err)

    def caps(self, path: str) -> dict[str, str]:
        """Return read caps by name."""
        out, _ = self.run_command("--json", "ls", path)
        listed = map(json.loads, out.splitlines())
        return {each["path"][-1]: each["cap"] for each in listed}

    def test_to_the_grid(self) -> None:
        """A file takes its name along or another one; what is there is replaced with -f only."""
        self.run_command("cp", "one", "home:")
        self.run_command("cp", "one", "home:uno")
        self.assertEqual(self.listed(), ["one", "uno"])
        self.refused("two", "home:one", said="replace it with -f")
        self.assertEqual(self.run_command("cat", "home:one")[0], "1" * 300)
        self.run_command("cp", "-f", "two", "home:one")
        self.assertEqual(self.run_command("cat", "home:one")[0], "2" * 400)
        self.refused("one", "home:new/", said="no directory 'new'")
        self.refused("one", "home:no/new/", said="no directory 'new'")
        self.run_command("cp", "one", "home:way/new")
        self.assertEqual(self.listed("home:way"), ["new"])
        self.refused("one", "home:one/x", said="'one' is not a directory")
        self.refused("one", "two", said="both local files")
        self.refused("no", "home:", said="no local file no", status=1)
        self.refused("d", "home:", said="add -r")
        self.refused("one", "hom:x", said="did you mean 'home'?")

    def test_directories_to_the_grid(self) -> None:
        """They keep their names, also in one that is made for them; those that are there take more."""
        self.run_command("cp", "-r", "d/", "home:new/inner")
        tree = ["d/", "d/a", "d/e/", "d/e/b", "d/link"]
        self.assertEqual(self.listed("home:new/inner"), tree)
        self.run_command("get", "-r", "home:new/inner", "-o", "back")
        self.assertEqual(os.readlink(self.home / "back/d/link"), "a")
        self.refused("-r", "d", "home:new/inner", said="replace it with -f")
        (self.home / "d/more").write_text("more")
        self.run_command("cp", "-rf", "d", "home:new/inner")
        self.assertIn("d/more", self.listed("home:new/inner"))
        self.run_command("mkdir", "home:d/e")
        self.run_command("cp", "-r", "d", "home:")
        self.assertEqual(self.listed("home:d"), ["a", "e/", "e/b", "link", "more"])
        self.run_command("cp", "one", "two", "home:both")
        self.assertEqual(self.listed("home:both"), ["one", "two"])
        self.run_command("rm", "-r", "home:both")
        self.refused("one", "d/../one", "home:both", said="would both be called 'one'", status=1)
        self.assertEqual(self.listed("home:both"), ["one"])
        self.refused("one", "two", "home:both/one", said="'one' is a file")

    def test_a_thousand_files(self) -> None:
        """One command publishes the directory that they go into once, whatever is in them."""
        names = [f"n{number}" for number in range(1000)]
        for name in names:
            (self.home / name).write_text(name)
        self.run_command("cp", *names, "home:many")
        self.assertEqual(len(self.listed("home:many")), 1000)
        self.assertEqual(self.publishes("home:many"), {2})  # empty, then with all of them
        self.assertEqual(self.publishes("home:"), {2})

    def publishes(self, path: str) -> set[int]:
        """Return the sequence numbers that shares of a directory have on the servers' disks."""
        cap, _ = self.run_command("mkdir", path)
        index, _ = self.run_command("storage-index", cap)
        found = list((self.home / ".local/share/pipegrid/storage").rglob(f"{index}/*"))
        self.assertTrue(found)
        heads = [path.read_bytes()[DATA_OFFSET : DATA_OFFSET + 9] for path in found]
        return {int.from_bytes(head[1:], "big") for head in heads}

    def test_within_the_grid(self) -> None:
        """What can never change is the same cap; of what can change the copy stays as it is."""
        self.run_command("cp", "-r", "one", "d", "home:from")
        mutable, _ = self.run_command("put", "--mutable", "one", "home:from/mutable")
        before = self.caps("home:from")
        self.run_command("cp", "-r", "home:from", "home:copy")  # a source with a name keeps it
        copied = self.caps("home:copy/from")
        self.assertEqual(sorted(copied), ["d", "mutable", "one"])
        self.assertEqual((copied["d"], copied["one"]), (before["d"], before["one"]))
        self.assertTrue(copied["mutable"].startswith("URI:CHK:"))
        self.run_command("put", "two", mutable)
        self.assertEqual(self.run_command("cat", "home:copy/from/mutable")[0], "1" * 300)
        self.run_command("cp", "home:from/one", "home:again")
        self.assertEqual(self.caps("home:")["again"], before["one"])
        out, _ = self.run_command("--json", "cp", "home:from/one", "home:again")
        self.assertEqual(json.loads(out)["outcome"], "same")
        self.run_command("cp", "home:from/one", "home:from/mutable")
        self.assertEqual(self.run_command("cat", mutable)[0], "1" * 300)
        self.refused("home:from/no", "home:x", said="no 'no' to copy")
        self.refused(mutable, "home:copy", said="no name")
        self.run_command("cp", mutable, "home:copy/named")
        self.run_command("cp", "two", mutable)
        self.assertEqual(self.run_command("cat", mutable)[0], "2" * 400)

    @in_fresh_processes
    def test_from_the_grid(self) -> None:
        """Nothing that is there is replaced without -f, and no name leads elsewhere."""
        self.run_command("cp", "-r", "one", "two", "d", "home:from")
        self.run_command("cp", "home:from/one", "here")
        self.assertEqual((self.home / "here").read_text(), "1" * 300)
        self.refused("home:from/two", "here", said="here", status=1)
        self.run_command("cp", "-f", "home:from/two", "here")
        self.assertEqual((self.home / "here").read_text(), "2" * 400)
        self.run_command("cp", "-r", "home:from/d", "home:from/one", "down")
        self.assertEqual((self.home / "down/d/e/b").read_text(), "b")
        self.assertEqual((self.home / "down/one").read_text(), "1" * 300)
        self.run_command("cp", "-r", "home:", "all")  # a source without a name: what is in it
        self.assertTrue((self.home / "all/from/two").exists())
        self.refused("home:from", "x", said="add -r")
        self.refused("home:from/one", "new/", said="no directory new/", status=1)
        self.run_command("ln", "home:from/one", "home:..")
        self.refused("home:..", "all", said="cannot be the name of a local file")

    def test_to_what_is_no_file(self) -> None:
        """Standard output by its name, also where it is a file that a shell appends to."""
        self.run_command("cp", "one", "home:")
        (self.home / "log").write_text("before ")
        for target, words in (("/dev/stdout", ()), ("/dev/fd/1", ("-f",))):
            with open(self.home / "log", "ab") as log:
                command = [sys.executable, "-m", "pipegrid.cli", "cp", *words, "home:one", target]
                subprocess.run(
                    command, cwd=self.home, env=self.environment, stdout=log, check=True, timeout=60
                )
        self.assertEqual((self.home / "log").read_text(), f"before {'1' * 300}{'1' * 300}")
        self.run_command("cp", "home:one", "/dev/null")

    def test_links_in_a_local_directory(self) -> None:
        """What has the name of a copy is in the way, and nothing comes where it leads."""
        self.run_command("cp", "-r", "one", "d", "home:")
        (self.home / "outside").mkdir()
        (self.home / "down").mkdir()
        for name, to in (("d", "../outside"), ("one", "../outside/one")):
            (self.home / "down" / name).symlink_to(to)
        self.refused("-r", "home:d", "down", said="down/d is a link already", status=1)
        self.refused("home:one", "down", said="exists already", status=1)
        self.run_command("cp", "-rf", "home:d", "home:one", "down")
        self.assertEqual(list((self.home / "outside").iterdir()), [])
        self.assertEqual((self.home / "down/d/a").read_text(), "a")
        self.assertEqual((self.home / "down/one").read_text(), "1" * 300)

    def test_caps_that_do_not_write(self) -> None:
        """A read cap, a tree that never changes, a verifier cap, a kind to come: a sentence each."""
        read_cap, _ = self.run_command("mkdir", "--read-only", "home:")
        self.assertTrue(read_cap.startswith("URI:DIR2-RO:"))
        tree, _ = self.run_command("put", "-r", "d")
        verifier = "URI:DIR2-Verifier:" + read_cap.partition("RO:")[2]
        self.refused("one", f"{read_cap}/x", said="cannot change it")
        self.refused("one", read_cap, said="cannot change it")
        self.refused("one", f"{tree}/x", said="immutable")
        self.refused("one", f"{verifier}/x", said="verifier cap")
        self.refused("one", "URI:DIR3:abc/x", said="not a cap that PipeGrid knows")
        self.refused("-r", "URI:DIR3:abc", "home:x", said="no read cap of it is known", status=2)
