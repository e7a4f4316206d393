"""What is said of directories: ``ls``, ``cat``, ``du``, ``stats``, ``manifest``; as users meet them."""

from __future__ import annotations

import json
import os

from tests.cli.processes import ProcessTestCase, in_fresh_processes


class DirectoryTests(ProcessTestCase):
    """One tree that cannot change, and a folder that can, with it in."""

    def setUp(self) -> None:
        super().setUp()
        source = self.home / "src"
        (source / "sub").mkdir(parents=True)
        (source / "file").write_text("x" * 300)
        (source / "sub/run.sh").write_text("echo")
        (source / "sub/run.sh").chmod(0o755)
        (source / "sub/tab\there").write_text("odd")
        os.symlink("file", source / "link")
        os.utime(source / "file", (1_700_000_000, 1_700_000_000))
        self.tree, _ = self.run_command("put", "-r", "src")
        self.run_command("alias", "create", "home")
        self.run_command("ln", self.tree, "home:tree")

    def refused(self, *arguments: str, said: str, status: int = 2) -> None:
        """Assert that a command fails with one sentence."""
        out, err = self.run_command(*arguments, status=status)
        self.assertEqual((out, err.count("pipegrid: ")), ("", 1), err)
        self.assertIn(said, err)

    def test_ls(self) -> None:
        """Names, with kinds, modes, sizes and times, and all that is below."""
        out, _ = self.run_command("ls", "home:tree")
        self.assertEqual(out.splitlines(), ["file", "link", "sub/"])
        out, _ = self.run_command("ls", "-R", "home:")
        self.assertEqual(
            out.splitlines(),
            [
                "tree/",
                "tree/file",
                "tree/link",
                "tree/sub/",
                "tree/sub/run.sh",
                "tree/sub/tab\\there",
            ],
        )
        out, _ = self.run_command("ls", "-l", f"{self.tree}/")
        file, link, sub = out.splitlines()
        self.assertTrue(file.startswith("-rw"), file)
        self.assertTrue(file.endswith("          300 2023-11-14 22:13:20Z file"), file)
        self.assertTrue(link.startswith("l"), link)
        self.assertTrue(link.endswith(" link -> file"), link)
        self.assertTrue(sub.startswith("drwx"), sub)
        out, _ = self.run_command("ls", "-lR", "home:tree/sub")
        self.assertTrue(out.startswith("-rwxr-xr-x"), out)
        out, _ = self.run_command("ls", "home:tree/file")
        self.assertEqual(out, "file")
        file = json.loads(self.run_command("ls", "--json", "home:tree/file")[0])["cap"]
        self.assertEqual(self.run_command("ls", file)[0], file)

    def test_read_only(self) -> None:
        """Caps to give away stand before the names, and change nothing."""
        self.run_command("put", "--mutable", "src/file", "home:plan")
        out, _ = self.run_command("ls", "--read-only", "home:")
        plan, tree = out.splitlines()
        self.assertRegex(plan, "^URI:SSK-RO:[a-z2-7:]* plan$")
        self.assertEqual(tree, f"{self.tree} tree/")
        self.assertEqual(self.run_command("cat", plan.split()[0])[0], "x" * 300)
        read_cap, _ = self.run_command("mkdir", "--read-only", "home:photos")
        self.assertTrue(read_cap.startswith("URI:DIR2-RO:"), read_cap)
        read_cap, _ = self.run_command("put", "--mutable", "--read-only", "src/file", "home:new")
        self.assertTrue(read_cap.startswith("URI:SSK-RO:"), read_cap)
        read_cap, _ = self.run_command("alias", "create", "--read-only", "other")
        self.assertTrue(read_cap.startswith("URI:DIR2-RO:"), read_cap)
        self.run_command("mkdir", "other:it-can-be-changed")
        self.refused("mkdir", "--read-only", said="write cap of the directory would be lost")
        self.refused(
            "put",
            "--mutable",
            "--read-only",
            "src/file",
            said="write cap of the mutable file would be lost",
        )

    @in_fresh_processes
    def test_cat_of_several(self) -> None:
        """A file that cannot be fetched, or a damaged cap, does not stop the others; it is named."""
        good = "home:tree/file"
        out, err = self.run_command(
            "cat", "home:tree/missing", good, "URI:CHK:x", good[:-1], status=1
        )
        self.assertEqual(out, "x" * 300)
        self.assertIn("no 'missing'", err)
        self.assertIn("cap number 3", err)
        out, err = self.run_command("cat", "URI:CHK:x", good, status=1)
        self.assertEqual(out, "x" * 300)
        self.assertIn("cap number 1", err)

    @in_fresh_processes
    def test_sums(self) -> None:
        """Contents, sizes, numbers, and a line for everything."""
        out, _ = self.run_command("cat", "home:tree/file", f"{self.tree}/sub/run.sh")
        self.assertEqual(out, "x" * 300 + "echo")
        out, _ = self.run_command("--json", "du", "home:")
        self.assertIn("311", out)
        out, _ = self.run_command("stats", "home:")
        self.assertIn("files: 4", out.replace("  ", " "))
        out, _ = self.run_command("manifest", "home:tree")
        lines = out.splitlines()
        self.assertEqual(len(lines), 6)
        self.assertTrue(lines[0].startswith(self.tree), out)

    def test_caps_of_other_kinds(self) -> None:
        """A verifier cap, a kind to come, a path through a file, no such name: a sentence each."""
        read_cap, _ = self.run_command("mkdir", "--read-only", "home:")
        verifier = "URI:DIR2-Verifier:" + read_cap.partition("RO:")[2]
        for command in (("ls",), ("ls", "-R"), ("du",), ("stats",), ("manifest",)):
            self.refused(*command, verifier, said="verifier cap")
            self.refused(*command, "URI:DIR3:abc", said="not a cap that PipeGrid knows")
            self.refused(*command, "home:tree/file/x", said="'tree/file' is not a directory")
            self.refused(*command, "home:no", said="there is no 'no'")
            self.refused(*command, "hom:", said="did you mean 'home'?")
        for command in (("ls",), ("cat",), ("get",), ("check",), ("renew", "-r"), ("repair",)):
            self.refused(*command, "home", said="did you mean 'home:'?")
            self.refused(*command, "home/tree/file", said="did you mean 'home:'?")
        self.refused("cat", verifier, said="directory")

    def test_storage_index(self) -> None:
        """Of directories, of what can change, and by verifier caps; the same for all caps of an object."""
        read_cap, _ = self.run_command("mkdir", "--read-only", "home:")
        write_cap = self.run_command("alias", "list")[0].split()[-1]
        indexes = self.run_command("storage-index", write_cap, read_cap)[0].split()
        self.assertEqual(indexes[0], indexes[1])
        verifier = f"URI:DIR2-Verifier:{indexes[0]}:{read_cap.rpartition(':')[2]}"
        self.assertEqual(self.run_command("storage-index", verifier)[0], indexes[0])
        out, _ = self.run_command("--json", "storage-index", write_cap)
        self.assertEqual(json.loads(out)["size"], None)
        self.assertRegex(self.run_command("storage-index", self.tree)[0], "^[a-z2-7]{26}$")
        self.refused("storage-index", "home:tree", said="only the grid knows")

    def test_aliases_of_paths(self) -> None:
        """An alias is of a cap: of a path it is said where to get that. A slash behind a cap says nothing."""
        self.refused(
            "alias", "add", "part", "home:tree", said="'pipegrid mkdir PATH' prints the cap"
        )
        self.refused("alias", "add", "part", f"{self.tree}/a", said="this is a path")
        self.run_command("alias", "add", "part", f"{self.tree}/")
        self.assertEqual(self.run_command("ls", "part:"), self.run_command("ls", self.tree))

    def test_paths_where_no_grid_is_asked(self) -> None:
        """``decode`` refuses a path; it once put an empty file in the place of another."""
        self.run_command("encode", "src/file", "--shares", "shares")
        (self.home / "out").write_text("precious")
        for path in ("home:tree/file", f"{self.tree}/file"):
            self.refused("decode", path, "shares", "-f", "-o", "out", said="only the grid knows")
        self.assertEqual((self.home / "out").read_text(), "precious")

    def test_files_where_directories_are_meant(self) -> None:
        """And the reverse: the sentence says how it is done."""
        self.refused("get", "home:tree", "-o", "x", said="'get -r' fetches all that is in it")
        self.refused("put", "src", said="'src' is a directory; add -r", status=1)
        self.refused(
            "put", "src", "home:x", said="'src' is a directory; 'pipegrid cp -r'", status=1
        )
        self.refused("put", "-r", "src", "home:x", said="'pipegrid cp -r' copies a directory")
        self.refused(
            "put", "src/file", "src/sub/run.sh", "home:", said="'pipegrid cp' copies several"
        )

    def test_paths_that_lead_nowhere_count(self) -> None:
        """In the sum of many objects each that was named is one."""
        out, _ = self.run_command(
            "--json", "check", "home:tree/file", "home:tree/no", "home:no", status=1
        )
        summary = json.loads(out.splitlines()[-1])["summary"]
        self.assertEqual([summary[name] for name in ("objects", "healthy", "failed")], [3, 1, 2])


class UnconfiguredTests(ProcessTestCase):
    """Where no grid is configured there are no aliases, and nothing that a cap could name."""

    def test_no_grid_is_made_for_a_cap(self) -> None:
        """It would have nothing, and say "lost" of what another grid has; what a cap holds needs no grid."""
        file = f"URI:CHK:{'a' * 26}:{'a' * 52}:3:10:1000"
        directory = file.replace("CHK", "DIR2-CHK")
        (self.home / "caps").write_text(f"{file}  name\n")
        for command in (
            ("get", file),
            ("get", "--cap-file", "caps"),
            ("get", "-r", directory, "-o", "there"),
            ("cat", f"{directory}/a"),
            ("check", file),
            ("check", "-r", f"{directory}:./a"),
            ("check", "--cap-file", "caps"),
            ("renew", file),
            ("repair", file),
            ("ls", directory),
            ("du", directory),
            ("stats", directory),
            ("manifest", directory),
            ("cp", f"{directory}/a", "there"),
            ("backups", directory),
            ("restore", directory, "a", "-o", "there"),
            ("backups",),
            ("restore", "-o", "there"),
            ("restore", "a/b", "-o", "there"),
            ("mirror", "debian", "--from-grid", directory, "there"),
            ("mirror", "rpm", "--from-grid", directory, "there"),
            ("ls", directory.replace("DIR2", "D1R2")),
        ):
            out, err = self.run_command(*command, status=2)
            self.assertEqual((out, err.count("pipegrid: ")), ("", 1), err)
            self.assertIn("no grid is configured in ", err)
            self.assertIn("'pipegrid init --introducer FURL'", err)
            self.assertNotIn("aaaa", err)
            self.assertEqual(os.listdir(self.home), ["caps"], command)
        _, err = self.run_command("-d", "nowhere", "get", file, status=2)
        self.assertIn("nowhere is not a grid directory", err)
        out, _ = self.run_command("cat", "URI:LIT:nbswy3dp")
        self.assertEqual(out, "hello")
        self.run_command("get", file, status=4)  # now there is a grid, which does not have it

    def test_no_grid_is_made_for_a_mirror(self) -> None:
        """It is put into a grid that somebody chose, or nowhere: before anything is fetched, or would be."""
        url = ("--from", "http://127.0.0.1:1/", "there")
        for command in (
            ("mirror", "list", "--to-grid", "list", *url),
            ("mirror", "list", "--to-grid", "--dry-run", "list", *url),
            ("mirror", "debian", "--to-grid", "--suite", "sid", *url),
            ("mirror", "rpm", "--to-grid", *url),
        ):
            out, err = self.run_command(*command, status=2)
            self.assertEqual((out, err.count("\n")), ("", 1), err)
            self.assertIn(
                "share/pipegrid, and --to-grid makes none; join one, or make one on this ", err
            )
            self.assertEqual(os.listdir(self.home), [], command)
        _, err = self.run_command("-d", "nowhere", "mirror", "rpm", "--to-grid", *url, status=2)
        self.assertIn("no grid is configured in nowhere, ", err)

    def test_no_grid_is_made_for_a_damaged_cap(self) -> None:
        """It would be in the way when the right one is given."""
        torn = f"URI:DIR2-RO:{'a' * 26}:{'a' * 20}"
        for command in (
            ("ls", torn),
            ("backups", torn),
            ("restore", torn, "-o", "there"),
            ("get", "-r", torn, "-o", "there"),
            ("put", str(__file__), f"{torn}/a"),
        ):
            out, err = self.run_command(*command, status=2)
            self.assertEqual((out, err.count("pipegrid: ")), ("", 1), err)
            self.assertIn("copy it whole", err)
            self.assertEqual(os.listdir(self.home), [], command)

    def test_no_grid_is_made_beside_what_comes_from_one(self) -> None:
        """A copy of ``private``, or servers that were named without 'init', wait for that to be done."""
        directory = self.home / ".local/share/pipegrid"
        file = self.home / "file"
        file.write_text("x" * 100)
        catalogue = f"URI:DIR2-RO:{'a' * 26}:{'a' * 52}\n"
        introducer = (
            "introducers: {a: {furl: 'pb://" + "a" * 32 + "@tcp:127.0.0.1:1/introducer'}}\n"
        )
        joining = "'pipegrid init NURL...' or 'pipegrid init --introducer FURL'"
        for name, content, how in (
            ("private/backup/catalogue.cap", catalogue, joining),
            ("private/aliases", f"home: {catalogue}", joining),
            ("private/servers.yaml", "storage: {}\n", "'pipegrid init'"),
            ("private/introducers.yaml", introducer, "'pipegrid init'"),
        ):
            (directory / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (directory / name).write_text(content)
            for command in (
                ("put", "file"),
                ("backup", "."),
                ("backups",),
                ("restore", "-o", "there"),
                ("get", catalogue.replace("DIR2", "SSK").strip()),
                ("status",),
            ):
                out, err = self.run_command(*command, status=2)
                self.assertEqual((out, err.count("pipegrid: ")), ("", 1), err)
                self.assertIn(f"{name} comes from one; join that with {how}, ", err)
            self.assertFalse((directory / "pipegrid.cfg").exists())
            (directory / name).unlink()
        (directory / "private/introducers.yaml").write_text(introducer)
        self.run_command("init")
        self.assertNotIn("[local]", (directory / "pipegrid.cfg").read_text())

    def test_backups_of_another_machine_want_their_cap(self) -> None:
        """Once there is a grid, a client that has made no backup says what restores those of others."""
        self.run_command("init")
        _, err = self.run_command("restore", "-o", "there", status=2)
        self.assertIn("give the cap that 'pipegrid backup' printed there\n", err)
        out, err = self.run_command("backups")
        self.assertEqual(out, "")
        self.assertIn("give the cap that 'pipegrid backup' printed there\n", err)
        self.assertEqual(self.run_command("-q", "backups"), ("", ""))

    def test_no_grid_is_made_for_an_alias(self) -> None:
        """It would be in the way of the grid that has the alias; a file of that name is one all the same."""
        (self.home / "file").write_text("x")
        for command in (
            ("ls", "work:"),
            ("du", "work:"),
            ("stats", "work:"),
            ("manifest", "work:a/b"),
            ("mkdir", "work:a"),
            ("rm", "work:a"),
            ("mv", "work:a", "work:b"),
            ("ln", "URI:LIT:me", "work:b"),
            ("cp", "file", "work:a"),
            ("cp", "work:a", "there"),
            ("put", "file", "work:a"),
            ("get", "-r", "work:", "-o", "there"),
            ("backups", "work:"),
            ("restore", "work:a", "-o", "there"),
            ("backup", ".", "--as", "work:a"),
        ):
            out, err = self.run_command(*command, status=2)
            self.assertEqual((out, err.count("pipegrid: ")), ("", 1), err)
            self.assertIn("there is no alias 'work', since nothing is configured in ", err)
            self.assertIn("pipegrid init", err)
            self.assertFalse((self.home / ".local").exists(), command)
        for command in (("get", "work:a"), ("cat", "work:a"), ("check", "work:a")):
            _, err = self.run_command(*command, status=2)
            self.assertIn("there is no alias 'work'", err)
        self.assertEqual(os.listdir(self.home), ["file"])
        _, err = self.run_command("-d", "nowhere", "ls", "work:", status=2)
        self.assertIn("nowhere is not a grid directory", err)
        _, err = self.run_command("rm", "CHK:key:secret", status=2)
        self.assertNotIn("secret", err)
        (self.home / "a:b").write_text("y")
        self.run_command("put", "a:b")
