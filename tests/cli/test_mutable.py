"""Aliases, directories that can be changed, and mutable files: as users meet them, in processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time

from tests.cli.processes import TIMEOUT_S, ProcessTestCase, in_fresh_processes


class MutableTests(ProcessTestCase):
    """Whole commands, on a grid that the first of them makes."""

    def setUp(self) -> None:
        super().setUp()
        (self.home / "one").write_bytes(b"1" * 300)
        (self.home / "two").write_bytes(b"2" * 400)
        self.private = self.home / ".local/share/pipegrid/private"
        self.cap, _ = self.run_command("alias", "create", "home")

    def listed(self, path: str = "home:") -> list[str]:
        """Return what ``ls`` shows."""
        out, _ = self.run_command("ls", path)
        return out.split()

    def refused(self, *arguments: str, said: str, status: int = 2) -> None:
        """Assert that a command fails with one sentence."""
        out, err = self.run_command(*arguments, status=status)
        self.assertEqual((out, err.count("pipegrid: ")), ("", 1), err)
        self.assertIn(said, err)

    def test_the_configured_format(self) -> None:
        """``[client] mutable.format`` decides for files and directories, unless an option does."""
        config = self.private.parent / "pipegrid.cfg"
        config.write_text(config.read_text().replace("[client]", "[client]\nmutable.format = MDMF"))
        for command in (("put", "--mutable", "one"), ("mkdir",), ("alias", "create", "new")):
            self.assertIn("MDMF", self.run_command(*command)[0])
        for command in (("put", "--mutable", "one"), ("mkdir",)):
            self.assertNotIn("MDMF", self.run_command(*command, "--format", "sdmf")[0])
        config.write_text(config.read_text().replace("MDMF", "XDMF"))
        self.refused("mkdir", said="[client] mutable.format is 'XDMF'")

    @in_fresh_processes
    def test_aliases(self) -> None:
        """They are listed and removed, for their owner alone; others' lines stay, and must be UTF-8."""
        path = self.private / "aliases"
        self.assertEqual(path.read_text(), f"home: {self.cap}\n")
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        own = path.read_bytes()
        path.write_bytes(b"# mine\nm\xfcsli: x\n" + own)
        for command in (("list",), ("add", "more", self.cap), ("remove", "home")):
            self.refused("alias", *command, said=f"{path}:2: it is not UTF-8")
        self.assertEqual(path.read_bytes(), b"# mine\nm\xfcsli: x\n" + own)
        others = "# mine\nm\u00fcsli\nno colon\n".encode()
        path.write_bytes(others + b"  spaced : x\n" + own.rstrip())
        read_cap, _ = self.run_command("alias", "list", "--read-only", status=2)
        self.assertIn("home: URI:DIR2-RO:", read_cap)
        self.run_command("alias", "add", "ro", read_cap.split()[-1])
        self.assertIn(others, path.read_bytes())
        self.run_command("put", "one", "home:a")
        self.assertEqual(self.listed("ro:"), ["a"])
        out, _ = self.run_command("alias", "remove", "ro:")
        self.assertEqual(out, read_cap.split()[-1])
        self.assertNotIn(b"ro:", path.read_bytes())
        self.assertTrue(path.read_bytes().startswith(others))
        self.refused("ls", "hom:", said="did you mean 'home'?")
        self.refused("alias", "create", "home", said="already")
        self.refused("alias", "add", "a/b", self.cap, said="cannot be an alias")
        self.refused("alias", "add", "file", "URI:LIT:ae", said="not the cap of a directory")
        self.refused("alias", "remove", "hom", said="did you mean 'home'?")

    def test_removing_what_stands_elsewhere_too(self) -> None:
        """All caps of the name are printed; and who removes 'tahoe' is told what it stands for now."""
        path = self.private / "aliases"
        path.write_text(f"tahoe: URI:DIR2-LIT:\ntahoe: {self.cap}\n")
        (self.private / "root_dir.cap").write_text(self.cap)
        out, err = self.run_command("alias", "remove", "tahoe:")
        self.assertEqual(out.split(), [self.cap, "URI:DIR2-LIT:"])
        self.assertIn("'tahoe' stands for the directory of", err)
        self.assertEqual(path.read_text(), "")

    def test_removing_an_alias_onto_a_full_disk(self) -> None:
        """Its cap may be the only copy: where that cannot be printed, the alias stays."""
        for words in (("alias", "remove", "home"), ("--json", "alias", "remove", "home:")):
            with open("/dev/full", "wb") as full:
                done = subprocess.run(
                    [sys.executable, "-m", "pipegrid.cli", *words],
                    cwd=self.home,
                    env=self.environment,
                    stdout=full,
                    stderr=subprocess.PIPE,
                    timeout=TIMEOUT_S,
                    check=False,
                )
            self.assertEqual((done.returncode, done.stderr.count(b"\n")), (1, 1), done.stderr)
            self.assertEqual((self.private / "aliases").read_text(), f"home: {self.cap}\n")
        self.assertEqual(self.run_command("alias", "remove", "home")[0], self.cap)

    def test_mutable_files(self) -> None:
        """They keep their caps when they are overwritten, by their name or their cap."""
        for format, start in (("sdmf", "URI:SSK:"), ("mdmf", "URI:MDMF:")):
            cap, _ = self.run_command(
                "put", "--mutable", "--format", format, "one", f"home:{format}"
            )
            self.assertTrue(cap.startswith(start))
            again, _ = self.run_command("put", "two", f"home:{format}")
            self.assertEqual(again, cap)
            self.assertEqual(self.run_command("cat", f"home:{format}")[0], "2" * 400)
            self.run_command("put", "one", cap)
            self.run_command("get", f"home:{format}", "-o", f"got-{format}")
            self.assertEqual((self.home / f"got-{format}").read_bytes(), b"1" * 300)
        cap, _ = self.run_command("put", "--mutable", "one")
        self.assertEqual(self.run_command("cat", cap)[0], "1" * 300)
        self.refused("put", "--mutable", "two", "home:sdmf", said="mutable file of this name")
        for force in ((), ("-f",)):  # who has the cap sees what is there
            self.run_command("put", "two", "home:mdmf")
            self.assertEqual(self.run_command("put", *force, "one", "home:mdmf")[0], again)
            self.assertEqual(self.run_command("cat", again)[0], "1" * 300)
        new, _ = self.run_command("put", "--mutable", "-f", "two", "home:mdmf")
        self.assertNotEqual(new, again)
        self.assertEqual(self.run_command("cat", again)[0], "1" * 300)
        self.refused("put", "--format", "mdmf", "two", said="add --mutable")
        self.refused("get", "home:sdmf", "--range", "0-9", said="--range")

    def test_names_of_local_files(self) -> None:
        """One that is not composed is the same name on the grid; one that is no text is like one."""
        decomposed, composed = "e\u0301", "\u00e9"
        (self.home / decomposed).write_bytes(b"new")
        self.run_command("mkdir", "home:d")
        cap, _ = self.run_command("put", "--mutable", "one", f"home:d/{composed}")
        self.assertEqual(self.run_command("put", decomposed, "home:d")[0], cap)
        self.assertEqual(self.run_command("cat", f"home:d/{decomposed}")[0], "new")
        with open(os.fsencode(self.home) + b"/caf\xe9", "wb") as file:
            file.write(b"odd")
        self.run_command("put", os.fsdecode(b"caf\xe9"), "home:d")
        self.assertEqual(self.listed("home:d"), ["caf\ufffd", composed])
        _, err = self.run_command("put", os.fsdecode(b"caf\xe9"), "home:d", status=2)
        self.assertIn("replace it with -f", err)

    def test_names(self) -> None:
        """Put, ln, mv, rm and mkdir change names; what would be lost is refused."""
        self.run_command("put", "one", "home:a")
        self.refused("put", "two", "home:a", said="replace it with -f")
        self.run_command("put", "-f", "two", "home:a")
        self.assertEqual(self.run_command("cat", "home:a")[0], "2" * 400)
        inner, _ = self.run_command("mkdir", "home:d/e")
        self.assertEqual(self.run_command("mkdir", "home:d/e")[0], inner)
        self.run_command("put", "one", "home:d")
        self.run_command("mv", "home:a", "home:d/e/b")
        self.run_command("mv", "home:d/one", "home:d/uno")
        self.run_command("ln", "home:d/e/b", "home:")
        self.assertEqual(self.listed(), ["b", "d/"])
        self.assertEqual(self.listed("home:d"), ["e/", "uno"])
        self.assertEqual(self.listed(inner), ["b"])
        self.refused("mv", "home:d", "home:d/e", said="into itself")
        self.refused("ln", "home:d/uno", "home:b", said="replace it with -f")
        self.refused("mv", "home:d/uno", "home:b", said="replace it with -f")
        self.refused("rm", "home:d", said="add -r")
        self.run_command("rm", "-r", "home:d")
        self.run_command("rm", "home:b")
        self.assertEqual(self.listed(), [])
        self.refused("rm", "home:b", said="there is no 'b'")

    def test_a_directory_that_would_be_replaced(self) -> None:
        """Its entry may be all that has its write cap: rm takes it out, and only if it is told to."""
        inner, _ = self.run_command("mkdir", "home:d/a")
        self.run_command("put", "one", "home:a")
        (self.home / "tree").mkdir()
        frozen, _ = self.run_command("put", "-r", "tree")
        for words in (
            ("put", "-", "home:d"),
            ("mv", "home:a", "home:d"),
            ("ln", "home:a", "home:d"),
            ("ln", frozen, "home:d"),
        ):
            for force in ((), ("-f",)):
                self.refused(*words, *force, said="already, and its cap may be stored nowhere else")
        self.assertEqual(self.listed("home:d"), ["a/"])
        self.run_command("ln", inner, "home:also")
        self.run_command("mv", "-f", "home:also", "home:d/a")  # nothing is lost
        self.assertEqual(self.listed(), ["a", "d/"])
        self.run_command("ln", frozen, "home:latest")
        self.run_command("ln", "-f", frozen, "home:latest")
        self.refused("mv", "home:d", "home:d/x/y", said="into itself")
        self.assertEqual(self.listed("home:d"), ["a/"])

    def test_a_move_that_is_killed_half_way(self) -> None:
        """What moves has two names then; the same command again takes the old one out."""
        script = (
            "import os, signal, sys\n"
            "from pipegrid.cli.startup.process import run_process\n"
            "from pipegrid.tree.directory import Directory\n"
            "Directory.unlink_same = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "sys.exit(run_process(sys.argv[1:]))\n"
        )
        self.run_command("put", "one", "home:a")
        self.run_command("put", "two", "home:d/inner")
        self.run_command("mkdir", "home:new")
        for source, path, found in (
            ("home:a", "home:new/b", "b"),
            ("home:d", "home:new/moved", "moved/"),
            ("home:new/moved", "home:", "moved/"),
        ):
            ended = subprocess.run(
                [sys.executable, "-c", script, "mv", source, path],
                cwd=self.home,
                env=self.environment,
                timeout=TIMEOUT_S,
            )
            self.assertEqual(ended.returncode, -signal.SIGKILL)
            home, _, name = source.rpartition("/" if "/" in source else ":")
            home = home if "/" in source else f"{home}:"
            self.assertIn(name, [each.rstrip("/") for each in self.listed(home)])
            self.run_command("mv", source, path)
            self.assertNotIn(name, [each.rstrip("/") for each in self.listed(home)])
            self.assertIn(found, self.listed(path.partition("/")[0]))
            self.refused("mv", source, path, said=f"there is no '{name}'")
        self.assertEqual(self.listed("home:new"), ["b"])
        self.assertEqual(self.listed("home:moved"), ["inner"])

    @in_fresh_processes
    def test_moves_to_what_is_the_same(self) -> None:
        """Another file of the name is never taken for it, and no directory goes where nothing leads."""
        self.run_command("put", "one", "home:a")
        self.run_command("put", "two", "home:d/a")
        self.refused("mv", "home:a", "home:d", said="replace it with -f")
        self.run_command("ln", "home:d", "home:d/loop")
        self.refused("mv", "home:d", "home:d/loop", said="into itself")
        self.run_command("mv", "home:d", "home:d")
        self.assertEqual(self.listed(), ["a", "d/"])

    def test_missing_directories(self) -> None:
        """What is missing of the way is made, as Tahoe-LAFS's commands do; what is there of it stays."""
        self.run_command("put", "one", "home:a/b/put")
        self.run_command("put", "--mutable", "one", "home:a/c/mutable")
        self.run_command("cp", "two", "home:a/d/e/cp")
        self.run_command("ln", "home:a/b/put", "home:f/ln")
        self.run_command("mv", "home:a/b/put", "home:f/g/mv")
        self.assertEqual(self.listed("home:a"), ["b/", "c/", "d/"])
        self.assertEqual(self.listed("home:a/d/e"), ["cp"])
        self.assertEqual(self.listed("home:f"), ["g/", "ln"])
        self.assertEqual(self.run_command("cat", "home:f/g/mv")[0], "1" * 300)
        self.assertEqual(self.run_command("cat", "home:a/c/mutable")[0], "1" * 300)
        self.refused("mv", "home:a", "home:a/b/new/deeper", said="into itself")
        self.run_command("mv", "home:f/g/mv", "home:f/g/mv")
        self.assertEqual(self.listed("home:f/g"), ["mv"])

    def test_times(self) -> None:
        """Links have the time at which they were made."""
        self.run_command("put", "one", "home:a")
        out, _ = self.run_command("--json", "ls", "home:")
        linked = json.loads(out)["metadata"]["tahoe"]["linkmotime"]
        self.assertLess(abs(linked - time.time()), 100)

    def test_wrong_places(self) -> None:
        """A sentence each."""
        read_cap, _ = self.run_command("alias", "list", "--read-only")
        read_cap = read_cap.split()[-1]
        tree, _ = self.run_command("put", "-r", ".local/share/pipegrid/storage/00", status=0)
        self.run_command("put", "one", "home:a")
        verifier = "URI:DIR2-Verifier:" + read_cap.partition("RO:")[2]
        self.refused("put", "one", f"{read_cap}/x", said="cannot change it")
        self.refused("rm", f"{read_cap}/a", said="cannot change it")
        self.refused("mkdir", f"{tree}/x", said="immutable")
        self.refused("put", "one", f"{verifier}/x", said="verifier cap")
        self.refused("put", "one", "home:a/x", said="'a' is not a directory")
        self.refused("rm", "home:no/x", said="leads through 'no', which does not exist")
        self.refused("mv", "home:no/x", "home:y", said="leads through 'no', which does not exist")
        self.refused("put", "missing", "home:no/x", said="no local file missing", status=1)
        self.refused("ln", "home:b", "home:no/x", said="no 'b' to link")
        self.assertEqual(self.listed(), ["a"])
        self.refused("put", "one", "nowhere:x", said="no alias 'nowhere'")
        self.refused("put", "-f", "one", said="-f is for a PATH")
        # A slash at the end says that it is a directory.
        for force in ((), ("-f",)):
            for path in ("home:b/", "home:no/b/"):
                self.refused("put", *force, "one", path, said="there is no directory 'b'")
                for command in ("ln", "mv"):
                    self.refused(command, *force, "home:a", path, said="there is no directory 'b'")
            self.refused("put", *force, "one", "home:a/", said="there is no directory 'a'")
        self.assertEqual(self.listed(), ["a"])
        self.run_command("put", "--mutable", "one", "home:m")
        self.refused("put", "two", "home:m/", said="there is no directory 'm'")
        self.run_command("mkdir", "home:d/")
        self.run_command("put", "one", "home:d/")
        self.run_command("mv", "home:d/", "home:e/")
        self.assertEqual(self.listed("home:e"), ["one"])
        self.run_command("rm", "-r", "home:e")
        self.run_command("rm", "home:m")
        self.refused("mkdir", "home:a", said="is not a directory")
        self.refused("put", "missing", "home:x", said="missing", status=1)
        # Nothing is stored of what no name can be given, nor any of the way made.
        long = "x" * 40_000
        for name in (long, os.fsdecode(b"\xfe")):
            self.refused("put", "one", f"home:b/{name}", said="cannot link")
            self.refused("cp", "one", f"home:b/{name}", said="cannot link")
            self.refused("mkdir", f"home:b/{name}", said="cannot link")
            self.refused("mv", "home:a", f"home:{name}", said="cannot link")
        self.assertEqual(self.listed(), ["a"])

    def test_local_files(self) -> None:
        """A file whose name looks like a path on the grid is stored as any other."""
        (self.home / "odd:name").write_bytes(b"odd")
        out, _ = self.run_command("put", "one", "odd:name")
        self.assertEqual(len(out.split()), 2)

    @in_fresh_processes
    def test_looking_after_them(self) -> None:
        """check, renew and repair take them alone and in trees; a read cap does all but repair."""
        mutable, _ = self.run_command("put", "--mutable", "one", "home:mutable")
        self.run_command("put", "two", "home:plain")
        out, _ = self.run_command("check", "home:")
        self.assertTrue(out.startswith("healthy: 10 of 10 shares good"), out)
        out, _ = self.run_command("check", "--verify", "--add-lease", "home:mutable")
        self.assertTrue(out.startswith("healthy: 10 of 10 shares good"), out)
        out, _ = self.run_command("renew", "home:mutable")
        self.assertTrue(out.startswith("renewed: 10 of 10 shares"), out)
        for command, well, left in (
            ("check", "healthy", "good"),
            ("renew", "renewed", "have a lease"),
        ):
            out, _ = self.run_command(command, "-r", "home:")
            self.assertEqual(out, f"3 objects: 3 {well}, 30 of 30 shares {left}")
        shutil.rmtree(self.home / ".local/share/pipegrid/storage/03/shares")
        read_cap, _ = self.run_command("alias", "list", "--read-only")
        out, err = self.run_command("check", "-r", "--repair", read_cap.split()[-1], status=2)
        self.assertEqual(err.count("to repair a mutable file is to write it: use its write cap"), 2)
        self.assertIn("3 objects: 0 healthy, 1 repaired, 2 failed", out)
        out, _ = self.run_command("check", "-r", "home:", status=1)
        self.assertIn("3 objects: 1 healthy, 2 damaged", out)
        out, _ = self.run_command("repair", "home:mutable")
        self.assertTrue(out.startswith("repaired: 10 shares made again"), out)
        out, _ = self.run_command("repair", "-r", "home:")
        self.assertIn("3 objects: 2 healthy, 1 repaired", out)
        self.assertEqual(self.run_command("get", mutable)[0], "1" * 300)

    def test_servers_that_went_back(self) -> None:
        """All were restored from an old copy: that is said, and nothing built on it before -f."""
        storage = self.home / ".local/share/pipegrid/storage"
        self.run_command("put", "one", "home:a")
        shutil.copytree(storage, self.home / "copy")
        self.run_command("put", "two", "home:b")
        shutil.rmtree(storage)
        shutil.copytree(self.home / "copy", storage)
        said = "version 3 was seen before"
        self.refused("ls", "home:", said=said, status=1)
        self.refused("put", "two", "home:c", said="repair -f", status=1)
        self.refused("repair", "home:", said=said, status=1)
        out, err = self.run_command("check", "home:", status=1)
        self.assertTrue(out.startswith("damaged: 10 of 10 shares good"), out)
        self.assertIn(said, err)
        out, _ = self.run_command("--json", "check", "home:", status=1)
        self.assertIn(said, json.loads(out)["remarks"][0])
        out, _ = self.run_command("repair", "-f", "home:")
        self.assertTrue(out.startswith("repaired: 10 shares made again"), out)
        self.assertEqual(self.listed(), ["a"])
        self.run_command("put", "two", "home:c")
        self.assertEqual(self.listed(), ["a", "c"])

    def test_one_directory_that_cannot_be_read(self) -> None:
        """Is said to be one, quiet or not."""
        shutil.rmtree(self.home / ".local/share/pipegrid/storage")
        (self.home / ".local/share/pipegrid/storage").mkdir()
        out, err = self.run_command("-q", "check", "-r", "home:", status=4)
        self.assertIn("1 object: 0 healthy, 1 lost, 1 directory unreadable", out)
        self.assertIn("could not be read, so its entries were not processed", err)
