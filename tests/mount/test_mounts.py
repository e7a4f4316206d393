"""``pipegrid mount`` as users meet it: real mounts, read by other programs, and all that can be wrong."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import skipUnless

from pipegrid.errors import UsageError
from pipegrid.mount import mount_point_checks
from pipegrid.speedtest.child_processes import Servers
from tests.cli.processes import TIMEOUT_S, ProcessTestCase
from tests.transfer.world import content

MOUNT_S = 60.0


def no_fuse() -> str | None:
    """Return why nothing can be mounted here; None: it can."""
    try:
        os.close(os.open(mount_point_checks.DEVICE, os.O_RDWR))
    except OSError as error:
        return f"{mount_point_checks.DEVICE} cannot be opened: {error.strerror}"
    return None


class MountTestCase(ProcessTestCase):
    """A home with one backup, and a directory to mount on."""

    skip = no_fuse()

    def setUp(self) -> None:
        super().setUp()
        self.source = self.home / "src"
        (self.source / "d/e").mkdir(parents=True)
        for name, size in (
            ("large", 3_000_000),
            ("d/e/middle", 200_000),
            ("d/tiny", 3),
            ("none", 0),
        ):
            (self.source / name).write_bytes(content(size, name))
        for number in range(30):
            (self.source / f"d/{number:02}").write_bytes(b"line of text %d\n" % number * 20)
        (self.source / "d/link").symlink_to("../large")
        (self.source / os.fsdecode(b"not UTF-8 \xff")).write_bytes(b"x" * 100)
        (self.source / "a name\nof two lines").write_bytes(b"y" * 100)
        (self.source / "d/e/middle").chmod(0o640)
        (self.source / "d").chmod(0o750)
        self.point = self.home / "point"
        self.point.mkdir()
        self.addCleanup(self.unmount)

    def unmount(self) -> None:
        """Unmount whatever is there."""
        for _ in range(5):
            if mount_point_checks.mounted_type(os.path.realpath(self.point)) is None:
                return
            mount_point_checks.unmount(str(self.point), lazy=True)

    def mount(self, *arguments: str) -> subprocess.Popen[str]:
        """Mount, and return the process when the tree can be used."""
        process = self.start("mount", *arguments)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        timer = threading.Timer(MOUNT_S, process.kill)
        timer.start()
        self.addCleanup(timer.cancel)
        assert process.stdout is not None
        if process.stdout.readline() != f"{self.point.name}\n":
            process.kill()
            self.fail(process.communicate()[1])
        timer.cancel()
        return process

    def ended(self, process: subprocess.Popen[str], status: int = 0) -> str:
        """Wait for the end of a mount; returns what it printed on stderr."""
        out, err = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, status, err)
        self.assertEqual(out, "")
        self.assertNotIn("Traceback", err)
        self.assertEqual(os.listdir(self.point), [])
        return err

    def program(self, *arguments: str, status: int = 0, cwd: Path | None = None) -> str:
        """Run another program; returns its output."""
        done = subprocess.run(
            arguments, cwd=cwd or self.home, capture_output=True, check=False, timeout=TIMEOUT_S
        )
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout.decode("utf-8", "surrogateescape")


class BackupsTests(MountTestCase):
    """This client's backups."""

    def test_other_programs(self) -> None:
        """They read what ``restore`` restores: names, bytes, modes, times and links; and cannot write."""
        self.run_command("backup", "src")
        self.run_command("restore", "-o", "restored")
        process = self.mount("point")
        self.assertEqual(os.listdir(self.point), ["src"])
        (run,) = set(os.listdir(self.point / "src")) - {"latest"}
        self.assertIn(run, self.run_command("backups")[0])
        self.assertEqual(os.readlink(self.point / "src/latest"), run)
        shown, restored = self.point / "src" / run, self.home / "restored"
        self.assertEqual(
            self.program("ls", "-AR", cwd=shown), self.program("ls", "-AR", cwd=restored)
        )
        self.program("diff", "--no-dereference", "-r", str(shown) + "/", str(restored))
        self.program("cp", "-a", f"{shown}/.", "copied")
        self.program("diff", "--no-dereference", "-r", "copied", "restored")
        grep = ("grep", "-rc", "line of text 7")
        self.assertEqual(
            sorted(self.program(*grep, ".", cwd=shown).splitlines()),
            sorted(self.program(*grep, ".", cwd=restored).splitlines()),
        )
        for path in [restored, *restored.rglob("*")]:
            place = os.path.relpath(path, restored)
            found, other = os.lstat(shown / place), os.lstat(path)
            self.assertEqual(found.st_mtime_ns, other.st_mtime_ns, place)
            if not path.is_symlink():
                self.assertEqual(found.st_mode, other.st_mode & ~0o222, place)
            self.assertEqual((found.st_uid, found.st_gid), (os.getuid(), os.getgid()))
        for write in (
            lambda: (shown / "new").mkdir(),
            lambda: (shown / "large").unlink(),
            lambda: (shown / "large").open("ab"),
            lambda: (shown / "large").chmod(0o777),
        ):
            self.assertEqual(self.assertRaises(OSError, write).errno, errno.EROFS)
        self.assertEqual(os.statvfs(shown).f_namemax, 255)
        process.terminate()
        self.ended(process)

    def test_other_encodings(self) -> None:
        """Names are the bytes that were stored, whatever encoding this system uses for names."""
        (self.source / "d/é").write_bytes(b"x")
        self.run_command("backup", "src")
        self.environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        process = self.mount("point")
        for name in ("d/é", os.fsdecode(b"not UTF-8 \xff")):
            expected = (self.source / name).read_bytes()
            self.assertEqual((self.point / "src/latest" / name).read_bytes(), expected)
        process.terminate()
        self.ended(process)

    def test_new_runs_appear(self) -> None:
        """After some seconds, without a new mount."""
        self.run_command("backup", "src")
        process = self.mount("point")
        self.assertEqual(os.listdir(self.point), ["src"])
        self.run_command("backup", "src/d", "--as", "other")
        until_s = time.monotonic() + TIMEOUT_S
        while "other" not in os.listdir(self.point) and time.monotonic() < until_s:
            time.sleep(0.5)
        self.assertEqual(os.listdir(self.point), ["other", "src"])
        process.send_signal(signal.SIGINT)
        self.ended(process)

    def test_no_backup(self) -> None:
        """There is an empty directory; for other users, too, and without a cache, if that was said."""
        self.run_command("init", "--local")
        process = self.mount("--allow-other", "--cache-size", "0", "point")
        self.assertEqual(os.listdir(self.point), [])
        table = Path("/proc/self/mountinfo").read_text("utf-8")
        (line,) = [
            line for line in table.splitlines() if f" {os.path.realpath(self.point)} " in line
        ]
        for option in ("ro,", "nosuid", "nodev", "allow_other", "default_permissions"):
            self.assertIn(option, line)
        self.assertFalse((self.home / ".cache").exists())
        process.terminate()
        self.ended(process)

    @skipUnless(os.access("/sys/class/bdi", os.W_OK), "only root may set it, and few containers")
    def test_read_ahead(self) -> None:
        """The kernel reads a tree that root has mounted ahead in long requests."""
        self.run_command("backup", "src")
        process = self.mount("point")
        device = os.stat(self.point).st_dev
        setting = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        self.assertEqual(Path(setting).read_text("ascii"), f"{mount_point_checks.READ_AHEAD_KIB}\n")
        self.assertEqual(
            (self.point / "src/latest/large").read_bytes(), content(3_000_000, "large")
        )
        process.terminate()
        self.ended(process)

    def test_the_second_read(self) -> None:
        """It needs no server: the shares are gone, and the kernel has forgotten the file."""
        self.run_command("backup", "src")
        process = self.mount("point")
        large, middle = self.point / "src/latest/large", self.point / "src/latest/d/e/middle"
        self.assertEqual(large.read_bytes(), (self.source / "large").read_bytes())
        shutil.rmtree(self.home / ".local/share/pipegrid/storage")
        with large.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self.assertEqual(file.read(), (self.source / "large").read_bytes())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self.assertEqual(
                os.pread(file.fileno(), 1000, 1_234_567),
                (self.source / "large").read_bytes()[1_234_567:1_235_567],
            )
        error = self.assertRaises(OSError, middle.read_bytes)
        self.assertEqual(error.errno, errno.EIO)
        self.assertEqual(large.read_bytes(), (self.source / "large").read_bytes())
        process.terminate()
        self.assertIn("/d/e cannot be read: no share of the file", self.ended(process))


class DirectoriesTests(MountTestCase):
    """A directory of the grid."""

    def test_caps_and_aliases(self) -> None:
        """A cap, an alias, and a path; what changes there appears. A file cannot be mounted."""
        self.run_command("alias", "create", "home")
        self.run_command("cp", "-r", "src", "home:tree")
        process = self.mount("home:tree/src/d", "point")
        self.assertEqual(sorted(os.listdir(self.point)), sorted(os.listdir(self.source / "d")))
        self.program("fusermount3", "-u", "point")
        self.ended(process)
        process = self.mount("home:", "point")
        self.assertEqual(os.listdir(self.point), ["tree"])
        self.run_command("mkdir", "home:new")
        until_s = time.monotonic() + TIMEOUT_S
        while "new" not in os.listdir(self.point) and time.monotonic() < until_s:
            time.sleep(0.5)
        self.assertEqual(os.listdir(self.point), ["new", "tree"])
        process.terminate()
        self.ended(process)
        _, err = self.run_command("mount", "home:tree/src/large", "point", status=2)
        self.assertIn("not the cap of a directory", err)
        _, err = self.run_command("mount", "home:nowhere", "point", status=2)
        self.assertIn("nowhere", err)


class EndingTests(MountTestCase):
    """How a mount ends, and what is left."""

    def test_in_use(self) -> None:
        """Programs that are in it, or have files open, do not keep it; their next read fails."""
        self.run_command("backup", "src")
        process = self.mount("point")
        fd = os.open(self.point / "src/latest/large", os.O_RDONLY)
        self.assertEqual(os.read(fd, 10), (self.source / "large").read_bytes()[:10])
        process.terminate()
        self.assertIn("programs still had files open there", self.ended(process))
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.assertRaises(OSError, os.pread, fd, 10, 2_000_000)
        self.assertRaises(OSError, os.close, fd)

    def test_reads_that_wait(self) -> None:
        """They fail when the tree is unmounted, which does not wait for servers that never answer."""
        servers = Servers(1)
        servers.__enter__()
        self.addCleanup(servers.__exit__, None, None, None)
        client = ("-d", str(servers.client))
        self.run_command(*client, "backup", "src")
        process = self.mount(*client, "point")
        path = self.point / "src/latest/large"
        self.assertEqual(path.stat().st_size, 3_000_000)
        for server in servers.processes:
            server.send_signal(signal.SIGSTOP)
            self.addCleanup(server.send_signal, signal.SIGCONT)
        with subprocess.Popen(
            ["cat", path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as cat:
            self.addCleanup(cat.kill)
            time.sleep(0.5)
            self.assertIsNone(cat.poll())
            began_s = time.monotonic()
            process.terminate()
            self.ended(process)
            self.assertLess(time.monotonic() - began_s, 30)
            self.assertEqual(cat.wait(TIMEOUT_S), 1)

    def test_a_working_directory(self) -> None:
        """It may be the one to mount on: the command neither waits for its own mount nor keeps it in use."""
        self.run_command("backup", "src")
        process = subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", "mount", "."],
            cwd=self.point,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        timer = threading.Timer(MOUNT_S, process.kill)
        timer.start()
        self.addCleanup(timer.cancel)
        assert process.stdout is not None
        self.assertEqual(process.stdout.readline(), ".\n")
        self.assertEqual(os.listdir(self.point), ["src"])
        process.terminate()
        self.assertNotIn("programs still had files open", self.ended(process))

    def test_interrupted_before_it_is_mounted(self) -> None:
        """It is unmounted as soon as it is mounted; nothing is left."""
        self.run_command("init", "--local")
        slow = (
            "import sys, time, mfusepy; make = mfusepy.FUSE; "
            "mfusepy.FUSE = lambda *a, **k: (print('begins', flush=True), time.sleep(2), make(*a, **k)); "
            "sys.argv[1:] = ['mount', 'point']; import pipegrid.cli.__main__"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", slow],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        assert process.stdout is not None
        self.assertEqual(process.stdout.readline(), "begins\n")
        process.terminate()
        _, err = process.communicate(timeout=TIMEOUT_S)
        self.assertNotIn("programs still had files open", err)
        self.assertNotIn("Traceback", err)
        self.assertIsNone(mount_point_checks.mounted_type(os.path.realpath(self.point)))

    def test_killed(self) -> None:
        """The next mount frees the mount point, says so, and works."""
        self.run_command("backup", "src")
        process = self.mount("point")
        cache = self.home / ".cache/pipegrid/mount"
        (self.point / "src/latest/large").read_bytes()
        process.kill()
        process.wait()
        error = self.assertRaises(OSError, os.listdir, self.point)
        self.assertEqual(error.errno, errno.ENOTCONN)
        self.assertEqual(os.listdir(cache), [])
        process = self.mount("point")
        self.assertEqual(
            (self.point / "src/latest/large").read_bytes(), (self.source / "large").read_bytes()
        )
        process.terminate()
        self.assertIn("left by a mount whose process was killed", self.ended(process))

    def test_left_by_another_program(self) -> None:
        """It is not touched; the message has the command that removes it."""
        self.run_command("init", "--local")
        process = self.mount("point")
        process.kill()
        process.wait()
        self.patch(mount_point_checks, "FILE_SYSTEM", "other")
        said: list[str] = []
        error = self.assertRaises(
            UsageError, mount_point_checks.check_mount_point, str(self.point), said.append
        )
        self.assertIn("Transport endpoint is not connected", str(error))
        self.assertIn(f"'fusermount3 -u {self.point}'", str(error))
        self.assertEqual(said, [])


class WrongInputTests(MountTestCase):
    """Each is one sentence that says what to do, and changes nothing."""

    def test_mount_points(self) -> None:
        """Those that do not exist, are no directories, are not empty, or are in use."""
        self.run_command("init", "--local")
        (self.home / "file").write_bytes(b"")
        for point, reason in (
            ("nowhere", "there is no directory nowhere; make it with 'mkdir nowhere'"),
            ("file", "file is not a directory; choose an empty one"),
            ("src", "src is not empty, and its files would be hidden; choose an empty directory"),
        ):
            out, err = self.run_command("mount", point, status=2)
            self.assertEqual((out, err), ("", f"pipegrid: {reason}\n"))
        process = self.mount("point")
        out, err = self.run_command("mount", "point", status=2)
        self.assertIn("point is in use: something is mounted there; unmount it with", err)
        process.terminate()
        self.ended(process)

    def test_arguments(self) -> None:
        """Too few, too many, or empty; a cache that is too small, or has no place; and no grid."""
        _, err = self.run_command("mount", "point", status=2)
        self.assertIn("no grid is configured", err)
        self.run_command("init", "--local")
        for arguments, reason in (
            ((), "give the directory to mount on"),
            (("a", "b", "c"), "give the directory to mount on"),
            (("",), "the name is empty"),
            (("point", "src@latest:"), "DIR comes last, after 'src@latest:'"),
            (("--cache-size", "5", "point"), "--cache-size is at least 1MiB, or 0"),
        ):
            _, err = self.run_command("mount", *arguments, status=2)
            self.assertIn(reason, err)
        (self.home / "file").write_bytes(b"")
        _, err = self.run_command("mount", "--cache-dir", "file/x", "point", status=1)
        self.assertIn(f"no cache can be kept in {self.home}/file/x: Not a directory", err)
        self.assertIsNone(mount_point_checks.mounted_type(str(self.point)))

    def run_changed(self, change: str) -> str:
        """Mount in a process that was changed; returns what it printed."""
        code = (
            f"import sys; sys.argv[1:] = ['mount', 'point']; {change}; import pipegrid.cli.__main__"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        lines = [each for each in done.stderr.splitlines() if each]
        self.assertEqual(len(lines), 1, done.stderr)
        return lines[0]

    def test_no_fuse(self) -> None:
        """Without the device, the program, the library or the module it says what to install."""
        self.run_command("init", "--local")
        module = "import pipegrid.mount.mount_point_checks as m"
        err = self.run_changed(f"{module}; m.DEVICE = '/dev/nothing'")
        self.assertIn("this system has no FUSE, since /dev/nothing is missing: install", err)
        err = self.run_changed(f"{module}; m.DEVICE = '/'")
        self.assertIn("FUSE cannot be used, since / cannot be opened", err)
        err = self.run_changed(f"{module}; m.PROGRAMS = ('no-such-program',)")
        self.assertIn("FUSE is not installed, since there is no no-such-program: install", err)
        err = self.run_changed("sys.modules['mfusepy'] = None")
        self.assertIn("pip install 'pipegrid[mount]'", err)
        self.environment["FUSE_LIBRARY_PATH"] = "/nothing.so"
        self.assertIn("needs FUSE's library, which cannot be loaded", self.run_changed("pass"))
