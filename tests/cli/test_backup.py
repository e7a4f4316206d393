"""``put -r``, ``backup``, ``backups``, ``restore``: as users meet them, in processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from random import Random

from twisted.trial.unittest import SkipTest

from tests.cli.processes import TIMEOUT_S, ProcessTestCase, in_fresh_processes

ACCESS_LIST = bytes.fromhex(
    "0200000001000600ffffffff02000600d204000004000400ffffffff10000600ffffffff20000400ffffffff"
)
"""User 1234 may read and write."""

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
"""For raw sockets."""


class CommandTests(ProcessTestCase):
    """Whole commands."""

    def setUp(self) -> None:
        super().setUp()
        self.source = self.home / "src"
        self.random = Random(1)

    def write(self, path: str, size: int = 200) -> None:
        """Make a file."""
        target = self.source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.random.randbytes(size))

    @in_fresh_processes
    def test_round_trip(self) -> None:
        """What was backed up is restored from the printed cap alone, modes, times and odd names included."""
        self.write("a/file", 70_000)
        self.write("a/run.sh")
        (self.source / "a/run.sh").chmod(0o755)
        (self.source / "empty").mkdir()
        os.symlink("a/file", self.source / "link")
        with open(os.fsencode(self.source) + b"/caf\xe9", "wb") as file:
            file.write(b"odd")
        os.utime(self.source / "a", ns=(1, 10**18 + 1))
        catalogue, _ = self.run_command("backup", "src", "--as", "home")
        first, _ = self.run_command("put", "-r", "src")
        subprocess.run(
            ["rm", "-rf", str(self.home / ".local/share/pipegrid/private/backup")], check=True
        )
        self.run_command("restore", catalogue, "-o", "back")
        again, _ = self.run_command("put", "-r", "back")
        self.assertEqual(again, first)
        self.assertTrue(os.path.lexists(os.fsencode(self.home) + b"/back/caf\xe9"))
        self.assertEqual(os.stat(self.home / "back/a").st_mtime_ns, 10**18 + 1)
        out, _ = self.run_command("backups", catalogue)
        self.assertRegex(out, r"^home@\S+Z:  3 files, 70.2 kB$")
        _, err = self.run_command("restore", "", "-o", "wrong", status=2)  # for instance "$UNSET"
        self.assertIn("perhaps a variable is not set", err)
        self.run_command("restore", catalogue, "a", "-o", "part")
        self.assertEqual(sorted(os.listdir(self.home / "part")), ["file", "run.sh"])

    def test_one_file(self) -> None:
        """Comes back alone, into a directory that may be there, with mode and time; so do links."""
        self.write("a/run.sh")
        (self.source / "a/run.sh").chmod(0o750)
        os.utime(self.source / "a/run.sh", ns=(1, 10**18 + 1))
        os.symlink("run.sh", self.source / "a/link")
        with open(os.fsencode(self.source) + b"/caf\xe9", "wb") as file:
            file.write(b"odd")
        self.run_command("backup", "src")
        target = self.home / "here"
        target.mkdir(0o700)
        (target / "other").touch()
        _, err = self.run_command("restore", "a/run.sh", "-o", "here")
        self.assertIn("1 file fetched (200 B)", err)
        self.assertEqual((target / "run.sh").read_bytes(), (self.source / "a/run.sh").read_bytes())
        found = os.stat(target / "run.sh")
        self.assertEqual((found.st_mode & 0o777, found.st_mtime_ns), (0o750, 10**18 + 1))
        self.assertEqual(os.stat(target).st_mode & 0o777, 0o700)
        self.run_command("restore", "/a/link", "-o", "here")
        self.assertEqual(os.readlink(target / "link"), "run.sh")
        catalogue = json.loads(self.run_command("backups", "--json")[0])["cap"]
        names = self.run_command("ls", catalogue)[0].splitlines()
        (odd,) = [name for name in names if name != "a/"]
        self.run_command("restore", odd, "-o", "here")
        self.assertTrue(os.path.lexists(os.fsencode(target) + b"/caf\xe9"))
        (target / "run.sh").write_bytes(b"mine")
        _, err = self.run_command("restore", "a/run.sh", "-o", "here", status=1)
        self.assertIn("here/run.sh is another file already", err)
        self.assertEqual((target / "run.sh").read_bytes(), b"mine")
        self.run_command("restore", "a/run.sh", "-o", "here", "-f")
        self.assertEqual((target / "run.sh").read_bytes(), (self.source / "a/run.sh").read_bytes())
        _, err = self.run_command("restore", "a/nothing", "-o", "here", status=2)
        self.assertIn("there is no 'nothing'", err)

    def test_one_cap(self) -> None:
        """Is printed after each run, reads, and is enough on a new machine, which can go on with the list."""
        self.write("a", 1000)
        printed, _ = self.run_command("backup", "src")
        self.assertTrue(printed.startswith("URI:DIR2-RO:"), printed)
        self.write("b", 2000)
        self.assertEqual(self.run_command("backup", "src")[0], printed)
        kept = self.home / ".local/share/pipegrid/private/backup/catalogue.cap"
        self.assertTrue(kept.read_text().startswith("URI:DIR2:"))
        self.assertEqual(stat.S_IMODE(kept.stat().st_mode), 0o600)
        for name in ("backup", "mutable-files"):  # a new machine has the servers, and nothing else
            shutil.rmtree(self.home / ".local/share/pipegrid/private" / name)
        self.run_command("restore", printed, "-o", "back")
        self.assertEqual((self.home / "back/b").read_bytes(), (self.source / "b").read_bytes())
        kept.parent.mkdir()
        kept.write_text(printed + "\n")
        another, _ = self.run_command("backup", "back", "--as", "new")
        self.assertNotEqual(another, printed)
        out, _ = self.run_command("backups", another)
        # In which order is a matter of their times, which are of whole seconds.
        self.assertEqual(
            sorted(line.partition("@")[0] for line in out.splitlines()), ["new", "src", "src"]
        )
        self.assertEqual(len(self.run_command("backups", printed)[0].splitlines()), 2)

    def test_under_an_alias(self) -> None:
        """Archives and Latest are kept, and the catalogue lists the runs as well."""
        self.write("d/a", 1000)
        self.run_command("alias", "create", "home")
        self.run_command("backup", "src", "--as", "home:backups/here")
        self.write("d/b", 1000)
        self.run_command("backup", "src", "--as", "home:backups/here")
        self.assertEqual(
            self.run_command("ls", "home:backups/here")[0].split(), ["Archives/", "Latest/"]
        )
        archives = self.run_command("ls", "home:backups/here/Archives")[0].split()
        self.assertEqual(len(archives), 2)
        out, _ = self.run_command("ls", f"home:backups/here/Archives/{archives[0]}d")
        self.assertEqual(out.split(), ["a"])
        self.run_command("get", "-r", "home:backups/here/Latest", "-o", "back")
        self.assertEqual((self.home / "back/d/b").read_bytes(), (self.source / "d/b").read_bytes())
        out, _ = self.run_command("backups")
        self.assertEqual([line.partition("@")[0] for line in out.splitlines()], ["src", "src"])
        out, _ = self.run_command("backups", "home:backups/here")
        # Nobody has noted there how many files they have.
        self.assertRegex(out, r"^here@\S+Z:\nhere@\S+Z:$")
        out, _ = self.run_command("--json", "backups", "home:backups/here")
        self.assertEqual(json.loads(out.splitlines()[0])["files"], None)
        _, err = self.run_command("restore", "hom:backups/here", "-o", "again", status=2)
        self.assertIn(
            "there is no alias 'hom', so 'hom:backups/here' is looked for in the run", err
        )
        _, err = self.run_command("restore", "hom:backups/here", "d", "-o", "again", status=2)
        self.assertIn("there is no alias 'hom'; give one CAP and one PATH", err)
        _, err = self.run_command("restore", "home-and-away:here", "d", "-o", "again", status=2)
        self.assertIn("there is no alias 'home-and-awa...'; give one CAP and one PATH", err)
        self.run_command("restore", "home:backups/here", "d", "-o", "again")
        self.assertEqual((self.home / "again/b").read_bytes(), (self.source / "d/b").read_bytes())
        read_cap, _ = self.run_command("mkdir", "--read-only", "home:")
        for path, said in (
            ("hom:x", "did you mean 'home'?"),
            (f"{read_cap}/x", "cannot change it"),
            ("home:backups/here/Latest/d/a/x", "is not a directory"),
        ):
            out, err = self.run_command("backup", "src", "--as", path, status=2)
            self.assertEqual((out, err.count("pipegrid: ")), ("", 1), err)
            self.assertIn(said, err)

    def test_another_directory_of_that_name(self) -> None:
        """Needs a name of its own, which may be given beside an alias."""
        self.write("a")
        other = self.home / "other/src"
        other.mkdir(parents=True)
        (other / "b").write_bytes(b"b" * 100)
        self.run_command("backup", "src", "--keep-last", "1")
        out, err = self.run_command("backup", "other/src", "--keep-last", "1", status=2)
        self.assertEqual((out, err.count("pipegrid: ")), ("", 1), err)
        self.assertIn(f"'src' is the backup of {self.source}: choose a name", err)
        self.run_command("alias", "create", "home")
        both = ("--as", "more", "--as", "home:more")
        self.run_command("backup", "other/src", "--keep-last", "1", *both)
        out, _ = self.run_command("--json", "backups")
        runs = [json.loads(line) for line in out.splitlines()]
        self.assertEqual(
            {run["name"]: run["directory"] for run in runs},
            {"src": str(self.source), "more": str(other)},
        )
        out, _ = self.run_command("ls", "home:more/Latest")
        self.assertEqual(out.split(), ["b"])
        for wrong in (("--as", "a", "--as", "b"), ("--as", "home:a", "--as", "home:b")):
            _, err = self.run_command("backup", "src", *wrong, status=2)
            self.assertIn("give one NAME and one ALIAS:PATH", err)

    def test_another_machine(self) -> None:
        """With the same catalogue needs a name of its own, or says that it goes on with this one."""
        self.write("a")
        self.run_command("backup", "src")
        private = self.home / ".local/share/pipegrid/private/backup"
        run = json.loads(self.run_command("--json", "backups")[0])
        self.assertEqual((len(run["machine"]), run["host"]), (16, os.uname().nodename))
        code = "import pipegrid.tree.backup.backup_state_directory as m; m.SYSTEM_FILES = (); "
        code += "import pipegrid.cli.__main__"

        def elsewhere(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-c", f"import sys; sys.argv[1:] = {arguments!r}; {code}"],
                cwd=self.home,
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
            )

        (private / "catalogue.json").unlink()  # as on a machine to which the cap alone was copied
        refused = elsewhere("backup", "src", "--keep-last", "1")
        self.assertEqual((refused.returncode, refused.stdout), (2, ""), refused.stderr)
        self.assertIn(f"'src' is the backup of {self.source} on ", refused.stderr)
        self.assertIn("--as", refused.stderr)
        done = elsewhere("backup", "src", "--keep-last", "1", "--as", "src")
        self.assertEqual(done.returncode, 0, done.stderr)
        out, _ = self.run_command("backups")
        self.assertEqual(out.count(f", on {os.uname().nodename}"), 2, out)
        _, err = self.run_command("restore", "-o", "back")
        self.assertIn(f", on {os.uname().nodename}", err)

    def test_what_no_tree_holds(self) -> None:
        """Is counted in the summary; the status is 0, and with ``--strict`` 1."""
        self.write("good")
        self.write("skipped.tmp")
        self.write(".good.pipegrid-part")
        os.mkfifo(self.source / "pipe")
        out, err = self.run_command("put", "-r", "--exclude", "*.tmp", "src")
        self.assertTrue(out.startswith("URI:DIR2-CHK:"))
        self.assertIn("1 file (200 B) in 1 directory", err)
        self.assertIn("; skipped 1 pipe, socket or device; skipped 1 part file\n", err)
        strict, err = self.run_command(
            "-v", "put", "-r", "--strict", "--exclude", "*.tmp", "src", status=1
        )
        self.assertEqual(strict, out)
        self.assertIn("pipe: skipped: it is a named pipe\n", err)
        for options, status in (([], 0), (["--dry-run"], 0), (["--strict"], 1)):
            self.run_command("backup", *options, "src", status=status)
        out, _ = self.run_command("--json", "backup", "src")
        said = [json.loads(line) for line in out.splitlines()]
        self.assertIn({"path": "pipe", "skipped": "a named pipe"}, said)
        last = said[-1]
        found = (last["files"], last["left_out"], last["skipped"], last["part_files"])
        self.assertEqual(found, (2, 0, 1, 1))
        _, err = self.run_command("restore", "-o", "back")
        self.assertNotIn("left out", err)
        self.assertEqual(sorted(os.listdir(self.home / "back")), ["good", "skipped.tmp"])

    def test_something_left_out(self) -> None:
        """Is named in a line of its own; the status is 1, and the cap is printed all the same."""
        self.write("good")
        (self.home / "list").write_text("good\nlost\n")
        listed = ["--files-from", "list", "src"]
        reason = "pipegrid: lost: left out: it is in the list, but does not exist\n"
        out, err = self.run_command("put", "-r", *listed, status=1)
        self.assertTrue(out.startswith("URI:DIR2-CHK:"))
        self.assertIn(reason, err)
        self.assertIn("1 file (200 B) in 1 directory", err)
        for command in (("put", "-r"), ("backup",)):
            _, err = self.run_command(*command, "src/good", status=1)
            self.assertIn("src/good is not a directory; 'pipegrid put' alone stores a file", err)
        self.assertEqual(self.run_command("-q", "put", "-r", *listed, status=1)[1], reason)
        out, _ = self.run_command("--json", "backup", *listed, status=1)
        said = [json.loads(line) for line in out.splitlines()]
        self.assertEqual(said[0]["path"], "lost")
        self.assertEqual((said[-1]["files"], said[-1]["left_out"]), (1, 1))
        _, err = self.run_command("restore", "-o", "back")
        self.assertRegex(err, r"src as of \S+Z; 1 left out when it was stored\n")

    def extended_source(self) -> None:
        """Make files with everything that only backups keep."""
        self.write("a", 5000)
        os.link(self.source / "a", self.source / "b")
        os.setxattr(self.source / "a", "user.comment", b"hello")
        os.setxattr(self.source / "a", "system.posix_acl_access", ACCESS_LIST)
        with open(self.source / "sparse", "wb") as file:
            file.truncate(3_000_000)
        self.write("program")
        (self.source / "program").chmod(0o755)

    def extended_target(self, target: Path) -> list[str]:
        """Return what is missing of it in a restored directory."""
        one = os.stat(target / "a").st_ino == os.stat(target / "b").st_ino
        names = ("user.comment", "system.posix_acl_access")
        given = [os.getxattr(target / "b", name) for name in names]
        found = {
            "link": one,
            "attributes": given == [b"hello", ACCESS_LIST],
            "holes": os.stat(target / "sparse").st_blocks < 100,
            "bytes": (target / "sparse").read_bytes() == bytes(3_000_000),
        }
        return [name for name, is_there in found.items() if not is_there]

    def test_extended_metadata(self) -> None:
        """As root: all comes back; capabilities only if asked for, and owners unless asked not to."""
        if os.geteuid():
            raise SkipTest("only root can change owners")
        self.extended_source()
        os.chown(self.source / "program", 1, 4321)
        os.setxattr(self.source / "program", "security.capability", CAPABILITY)
        self.run_command("backup", "src")
        _, err = self.run_command("restore", "-o", "back")
        self.assertEqual(self.extended_target(self.home / "back"), [])
        found = os.stat(self.home / "back/program")
        self.assertEqual((found.st_uid, found.st_gid), (1, 4321))
        self.assertIn(
            "pipegrid: privileged attributes of 1 entry not restored (they can give rights, and need "
            "--exact-modes), the first: program\n",
            err,
        )
        _, err = self.run_command("restore", "--exact-modes", "--no-owner", "-o", "all")
        self.assertNotIn("not restored", err)
        program = self.home / "all/program"
        self.assertEqual(os.getxattr(program, "security.capability"), CAPABILITY)
        self.assertEqual(os.stat(program).st_uid, 0)
        _, err = self.run_command("restore", "--numeric-owner", "--no-owner", "-o", "x", status=2)
        self.assertIn("not both", err)
        cap = self.run_command("-q", "put", "-r", "src")[0]
        self.run_command("get", "-r", cap, "-o", "shared")
        self.assertEqual(os.listxattr(self.home / "shared/a"), [])
        out, _ = self.run_command("--json", "restore", "-o", "json")
        last = json.loads(out.splitlines()[-1])
        self.assertEqual(last["not_restored"], {"privileged attribute": 1})

    def test_extended_metadata_of_an_unprivileged_user(self) -> None:
        """All that this user may set comes back; of the rest a line says what, how much and where."""
        if os.geteuid():
            raise SkipTest("only root can change owners")
        self.extended_source()
        nobody = 65534
        for path in (self.home, self.source, *self.source.iterdir()):
            os.chown(path, nobody, nobody)
        os.chown(self.source / "program", 1, 1)
        os.setxattr(self.source / "program", "security.capability", CAPABILITY)

        def run(*arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "pipegrid.cli", *arguments],
                cwd=self.home,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                user=nobody,
                group=nobody,
                extra_groups=[],
                check=False,
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stderr

        run("backup", "src")
        err = run("-v", "restore", "--exact-modes", "-o", "back")
        self.assertEqual(self.extended_target(self.home / "back"), [])
        for kind in ("owner", "privileged attribute"):
            self.assertIn(
                f"pipegrid: {kind}s of 1 entry not restored (this user may not set them), the first: "
                "program\n",
                err,
            )
            self.assertIn(f"program: {kind} not restored: this user may not set them\n", err)

    @in_fresh_processes
    def test_files_that_report_no_size(self) -> None:
        """Of ``/proc`` come whole, in trees as well as alone; each run reads them again."""
        out, _ = self.run_command("put", "-r", "/proc/self/net/stat")
        self.run_command("get", "-r", out.strip(), "-o", "back")
        names = os.listdir("/proc/self/net/stat")
        self.assertTrue(names)
        for name in names:
            self.assertTrue((self.home / "back" / name).stat().st_size, name)

    @in_fresh_processes
    def test_three_gets_into_one_directory(self) -> None:
        """All end well, and leave no part, whichever of them wrote which file."""
        self.write("large", 3_000_000)
        for number in range(30):
            self.write(f"d/f{number}", 5000)
        cap = self.run_command("-q", "put", "-r", "src")[0].strip()
        running = [self.start("get", "-r", cap, "-o", "back") for _ in range(3)]
        for each in running:
            _, err = each.communicate(timeout=TIMEOUT_S)
            self.assertEqual(each.returncode, 0, err)
        self.assertEqual(sorted(os.listdir(self.home / "back")), ["d", "large"])
        self.assertEqual(len(os.listdir(self.home / "back/d")), 30)
        self.assertEqual(self.run_command("-q", "put", "-r", "back")[0].strip(), cap)

    def test_modes_of_trees(self) -> None:
        """What the umask allows with ``get -r``, as stored with ``restore``; all with ``--exact-modes``."""
        self.write("d/f")
        (self.source / "d/f").chmod(0o4777)
        (self.source / "d").chmod(0o3777)
        cap = self.run_command("-q", "put", "-r", "src")[0].strip()
        self.run_command("backup", "src")
        for number, (command, file, directory) in enumerate(
            (
                (("get", "-r", cap), 0o755, 0o755),
                (("get", "-r", "--exact-modes", cap), 0o4777, 0o3777),
                (("restore",), 0o777, 0o3777),
                (("restore", "--exact-modes"), 0o4777, 0o3777),
            )
        ):
            target = self.home / f"back{number}"
            self.run_command(*command, "-o", str(target))
            found = [stat.S_IMODE((target / path).stat().st_mode) for path in ("d/f", "d")]
            self.assertEqual(found, [file, directory], command)
        _, err = self.run_command("get", "-r", "--max-paths", "2", cap, "-o", "few", status=1)
        self.assertIn("more than 2 paths", err)
        self.assertIn("or give --max-paths\n", err)

    def test_text_files_of_other_kinds(self) -> None:
        """A mark, or ends of lines as on Windows, change nothing; what is no UTF-8 is refused first."""
        self.write("kept")
        self.write("secret")
        self.run_command("put", "src/kept")  # makes the grid, and says so
        patterns = self.home / "patterns"
        listed = self.home / "listed"
        listed.write_bytes(b"\xef\xbb\xbfkept\r\n")
        for data in (b"\xef\xbb\xbfsecret\n", b"secret\r\n"):
            patterns.write_bytes(data)
            out, _ = self.run_command("put", "-r", "--exclude-from", "patterns", "src")
            self.assertEqual(out, self.run_command("put", "-r", "--files-from", "listed", "src")[0])
        for data, where in (
            ("secret\n".encode("utf-16"), "1: it is UTF-16"),
            (b"x\nsecr\xe9t\n", "2: it is not UTF-8"),
            (b"secret\n\0\n", "2: it holds a zero byte, as UTF-16 does"),
        ):
            patterns.write_bytes(data)
            for option in ("--exclude-from", "--files-from"):
                for command in (("put", "-r"), ("backup",)):
                    out, err = self.run_command(*command, option, "patterns", "src", status=2)
                    self.assertEqual(out, "")
                    self.assertIn(f"patterns:{where}; save the file as UTF-8 text\n", err)
            _, err = self.run_command("get", "--cap-file", "patterns", "-o", "x", status=2)
            self.assertIn(f"patterns:{where}", err)

    def test_patterns_that_match_nothing(self) -> None:
        """Each is reported with its place, unless any directory has what it matches; the status stays."""
        self.write("one/kept.txt")
        self.write("two/secret.key")
        self.run_command("put", "src/one/kept.txt")
        (self.home / "patterns").write_text("# of keys\n*.kay\n*.key\n")
        arguments = ["--exclude-from", "patterns", "--exclude", "cache/", "--exclude-vcs"]
        _, err = self.run_command("put", "-r", *arguments, "src/one", "src/two")
        said = [line for line in err.splitlines() if "matched nothing" in line]
        self.assertEqual(
            said,
            [
                "pipegrid: --exclude: the pattern 'cache/' matched nothing",
                "pipegrid: patterns:2: the pattern '*.kay' matched nothing",
            ],
        )
        for more in ([], ["--dry-run"]):
            _, err = self.run_command("backup", *arguments, *more, "src/two")
            self.assertIn("patterns:2: the pattern '*.kay' matched nothing\n", err)
            self.assertNotIn("'*.key'", err)

    def test_wrong_arguments(self) -> None:
        """A sentence each, and status 2 or 1."""
        self.write("a")
        self.run_command("put", "src/a")  # makes the grid, and says so
        for arguments, status in (
            (("put", "--exclude", "x", "src"), 2),
            (("put", "-r", "--exclude", "/", "src"), 2),
            (("put", "-r", "no"), 1),
            (("put", "-r", "src/a"), 1),
            (("backup", "src", "--as", "a/b"), 2),
            (("backup", "src", "--as", " "), 2),
            (("backup", "src", "--as", "..", "--dry-run"), 2),
            (("backup", "no"), 1),
            (("backup", ""), 2),
            (("backup", "src", "--files-from", "no"), 1),
            (("restore", "-o", "x"), 2),
            (("restore", "URI:LIT:ae", "-o", "x"), 2),
            (("backups", "URI:LIT:ae"), 2),
        ):
            _, err = self.run_command(*arguments, status=status)
            self.assertEqual(err.count("pipegrid: "), 1, err)

    def test_killed(self) -> None:
        """After ``kill -9`` a rerun completes, and what is listed and restored is whole."""
        for n in range(150):
            self.write(f"d{n // 15}/f{n}", 2000)
        self.run_command("put", "src/d0/f0")
        for after_s in (0.6, 0.9, 1.3):
            process = self.start("backup", "src")
            try:
                process.wait(after_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            process.communicate(timeout=TIMEOUT_S)
        catalogue, _ = self.run_command("backup", "src")
        self.run_command("restore", catalogue, "-o", "back")
        done = subprocess.run(["diff", "-r", "src", "back"], cwd=self.home, check=False)
        self.assertEqual(done.returncode, 0)
