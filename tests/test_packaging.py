"""What an installation brings; and that what the unit for systemd and the container run is there."""

from __future__ import annotations

import configparser
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.cmd_serve import ServeJob
from pipegrid.cli.command_grammar import parse
from pipegrid.cli.command_job import GridJob
from pipegrid.cli.console import Console

ROOT = Path(__file__).parent.parent
SYSTEMD = ROOT / "misc" / "systemd"
UNIT = SYSTEMD / "pipegrid.service"
CONTAINER = ROOT / "misc" / "Containerfile"
GATEWAY_CONTAINER = ROOT / "misc" / "gateway.containerfile"
HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "CapabilityBoundingSet": "",
    "RestrictSUIDSGID": "yes",
    "StateDirectoryMode": "0700",
    "UMask": "0077",
}


def program() -> str:
    """Return the name of the program that is installed."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    [line] = setup["options"]["scripts"].strip().splitlines()
    assert "from pipegrid.cli import main" in (ROOT / line).read_text()
    return Path(line).name


def copied() -> list[str]:
    """Return what of the source the container is built from, and so the wheel in it."""
    text = CONTAINER.read_text().replace("\\\n", " ")
    lines = [line.split() for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE)]
    return [word for words in lines if not words[0].startswith("--from") for word in words[:-1]]


def job(arguments: list[str]) -> object:
    """Return what a command line asks for."""
    return parse(arguments, Console(None, io.BytesIO(), io.StringIO()))[1]


def make_wheel(home: Path) -> Path:
    """Build the wheel in a directory from what the container's is built from; return its path."""
    tree, wheels = home / "tree", home / "wheels"
    tree.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "dropin.cache")
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    offline = ("--disable-pip-version-check", "--no-index")
    subprocess.run([*pip, *offline, "-w", str(wheels), str(tree)], check=True, timeout=100)
    (wheel,) = wheels.iterdir()
    return wheel


class InstalledTests(SynchronousTestCase):
    """``pip install .`` in a new environment, which has the dependencies of this one."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp()).absolute()
        self.wheel = make_wheel(self.home)
        self.venv = self.home / "venv"
        self.run_it(sys.executable, "-m", "venv", "--without-pip", str(self.venv))
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self.site = self.venv / "lib" / version / "site-packages"
        (self.site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
        self.run_it(
            *(sys.executable, "-m", "pip", "--python", self.program("python"), *install),
            str(self.wheel),
        )

    def program(self, name: str) -> str:
        """Return the path of a program of the environment."""
        return str(self.venv / "bin" / name)

    def run_it(self, *command: str, **more: str) -> str:
        """Run a command, which must succeed; return what it prints."""
        path = f"{self.venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment = {**kept, "HOME": str(self.home), "PATH": path, "LC_ALL": "C.UTF-8", **more}
        done = subprocess.run(
            command,
            cwd=self.home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_it_is_all_there(self) -> None:
        """The command, its manual page beside it, completion, and the plugin of ``twist``."""
        with zipfile.ZipFile(self.wheel) as archive:
            missing = {
                str(path.relative_to(self.home / "tree" / "src"))
                for path in (self.home / "tree" / "src").rglob("*.*")
                if path.suffix in (".py", ".html", ".css", ".js", ".svg", ".typed")
            } - set(archive.namelist())
        self.assertEqual(missing, set())
        where = "import pipegrid; print(pipegrid.__file__)"
        found = self.run_it(self.program("python"), "-c", where).strip()
        self.assertTrue(found.startswith(str(self.site)), found)
        self.assertRegex(self.run_it(self.program("pipegrid"), "--version"), r"^pipegrid [0-9]")
        shown = self.run_it("man", "pipegrid", MANPATH="")
        self.assertIn("store files on grids of storage servers", " ".join(shown.split()))
        (place,) = self.run_it(self.program("pipegrid"), "completion", "--install", "fish").split()
        self.assertIn("complete --no-files --command pipegrid", Path(place).read_text())
        listed = self.run_it(self.program("python"), "-m", "twisted", "--help")
        self.assertRegex(listed, r"(?m)^ +pipegrid +\S")


class CheckUnitTests(SynchronousTestCase):
    """``misc/systemd/pipegrid-check.service`` and its timer."""

    def test_what_it_runs(self) -> None:
        """The nightly command, as the how-to has it; and each night."""
        unit = configparser.ConfigParser(interpolation=None, strict=True)
        unit.optionxform = str  # type: ignore[method-assign, assignment]
        unit.read(SYSTEMD / "pipegrid-check.service")
        words = shlex.split(unit["Service"]["ExecStart"])
        self.assertEqual(Path(words[0]).name, program())
        self.assertEqual(words[1:6], ["check", "-r", "--repair", "--add-lease", "--from"])
        caps = Path(self.mktemp())
        caps.write_text("URI:LIT:nbswy3dp\n")
        self.assertIsInstance(job([*words[1:6], str(caps)]), GridJob)
        how_to = (ROOT / "docs" / "how-to-upkeep.md").read_text()
        self.assertIn(" ".join(words[1:6]), how_to)
        self.assertIn(Path(words[6]).name, how_to)
        timer = configparser.ConfigParser(interpolation=None, strict=True)
        timer.optionxform = str  # type: ignore[method-assign, assignment]
        timer.read(SYSTEMD / "pipegrid-check.timer")
        self.assertTrue(timer["Timer"]["OnCalendar"].startswith("*-*-* "))
        self.assertEqual(timer["Install"]["WantedBy"], "timers.target")


class UnitTests(SynchronousTestCase):
    """``misc/systemd/pipegrid.service``."""

    def setUp(self) -> None:
        self.unit = configparser.ConfigParser(interpolation=None, strict=True)
        self.unit.optionxform = str  # type: ignore[method-assign, assignment]
        self.unit.read(UNIT)
        self.service = self.unit["Service"]

    def test_what_it_runs(self) -> None:
        """``pipegrid serve`` in the state directory, with further options from a file."""
        words = shlex.split(self.service["ExecStart"])
        self.assertEqual(Path(words[0]).name, program())
        self.assertEqual(words.pop(), "$PIPEGRID_OPTIONS")
        self.assertEqual(words[1:3], ["-d", f"/var/lib/{self.service['StateDirectory']}"])
        more = ["--location", "storage.example.org:8098", "--log", "/var/log/pipegrid/server.log"]
        self.assertIsInstance(job(words[1:] + more), ServeJob)

    def test_secrets_stay_out_of_the_journal(self) -> None:
        """The server prints its addresses, which open it."""
        self.assertEqual(self.service["StandardOutput"], "null")

    def test_how_it_is_supervised(self) -> None:
        """It says that it is ready and alive, comes back whatever ends it, and rotates its log."""
        self.assertEqual(self.service["Type"], "notify")
        self.assertEqual(self.service["Restart"], "always")
        self.assertGreater(int(self.service["WatchdogSec"]), 30)
        self.assertIn("-HUP", self.service["ExecReload"])
        self.assertEqual(self.unit["Install"]["WantedBy"], "multi-user.target")
        rotated = (SYSTEMD / "pipegrid.logrotate").read_text()
        self.assertIn(f"/var/log/{self.service['LogsDirectory']}/", rotated)
        self.assertIn(f"kill -s HUP {UNIT.name}", rotated)

    def test_what_it_may_not(self) -> None:
        """Nothing but its own directories, and no privileges."""
        for name, value in HARDENED.items():
            self.assertEqual(self.service[name], value, name)
        user = (SYSTEMD / "pipegrid.sysusers").read_text().split()
        self.assertEqual(user[:2], ["u", self.service["User"]])

    def test_systemd_understands_it(self) -> None:
        """Where systemd is, it finds nothing wrong, and the server little exposed."""
        copy = Path(self.mktemp()).absolute() / UNIT.name
        copy.parent.mkdir()
        copy.write_text(UNIT.read_text().replace("/usr/bin/pipegrid", sys.executable))
        analyze = shutil.which("systemd-analyze")
        if analyze is None:
            self.assertIn(
                sys.executable, copy.read_text()
            )  # what could be looked at without it was
            return
        done = subprocess.run(
            [analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60
        )
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))
        done = subprocess.run(
            [analyze, "security", "--offline=true", "--threshold=30", str(copy)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(done.returncode, 0, done.stdout)


class ContainerTests(SynchronousTestCase):
    """``misc/Containerfile``."""

    def setUp(self) -> None:
        self.text = CONTAINER.read_text().replace("\\\n", " ")

    def instructions(self, name: str) -> list[str]:
        """Return what stands behind each instruction of a kind."""
        return re.findall(rf"^{name} (.*)$", self.text, re.MULTILINE)

    def test_what_is_copied_exists(self) -> None:
        """Nothing else is taken from the outside; `make_wheel` builds from it, too."""
        expected = ["LICENSE", "README.md", "bin", "man", "pyproject.toml", "setup.cfg", "src"]
        self.assertEqual(sorted(copied()), expected)
        for source in copied():
            self.assertTrue((ROOT / source).exists(), source)

    def test_what_it_runs(self) -> None:
        """The program with its directory, as a user of its own; server and client by the arguments."""
        [entry], [default] = self.instructions("ENTRYPOINT"), self.instructions("CMD")
        words = json.loads(entry)
        self.assertEqual(words[0], program())
        self.assertEqual(json.loads(default), ["--help"])
        shown = re.findall(
            r"^#     podman run .* pipegrid (serve|put) (.*)$", self.text, re.MULTILINE
        )
        self.assertEqual([command for command, _ in shown], ["serve", "put"])
        for command, rest in shown:
            arguments = shlex.split(rest.partition("<")[0])
            self.assertTrue(job([*words[1:], command, *arguments]))
        [user], [volume] = self.instructions("USER"), self.instructions("VOLUME")
        self.assertEqual((user, volume), ("pipegrid", words[2]))
        self.assertIn(f"-o {user}", self.text)


class GatewayPackagingTests(SynchronousTestCase):
    """``misc/systemd/pipegrid-gateway.service`` and ``misc/gateway.containerfile``."""

    def test_the_unit(self) -> None:
        """It runs the command, and waits for it to listen."""
        unit = configparser.ConfigParser(interpolation=None, strict=True)
        unit.optionxform = str  # type: ignore[method-assign, assignment]
        unit.read(SYSTEMD / "pipegrid-gateway.service")
        words = shlex.split(unit["Service"]["ExecStart"])
        self.assertEqual(Path(words[0]).name, program())
        self.assertEqual(words[1:], ["gateway", "$PIPEGRID_GATEWAY_OPTIONS"])
        self.assertIsInstance(job(words[1:2]), GridJob)
        self.assertEqual(unit["Service"]["Type"], "notify")

    def test_the_container(self) -> None:
        """It listens where the port is published, with what a gateway needs."""
        text = GATEWAY_CONTAINER.read_text().replace("\\\n", " ")
        (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
        (command,) = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
        words = [*json.loads(entry), *json.loads(command)]
        self.assertIsInstance(job(words[1:]), GridJob)
        self.assertIn("pipegrid[gateway]", text)
        (port,) = re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE)
        self.assertIn(f"tcp:{port}:", words[-1])
