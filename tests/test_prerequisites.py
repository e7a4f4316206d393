"""What ``make`` needs of the system: found in one step, installed with one call, or listed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from misc import fresh, prerequisites
from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).parent.parent
APT_GET = """\
#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
*update*) if mkdir "$LOG.first" 2>/dev/null; then
    echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)"; exit 100
    fi ;;
*chromium*) for each in chromium zsh; do printf '#!/bin/sh\\n' >"$BIN/$each"; chmod +x "$BIN/$each"; done ;;
esac
"""
"""The lists are locked once; then it installs, but one package does not bring what it should."""

SCRIPTED = """
import os, sys
from misc import prerequisites
from misc.prerequisites import Need, command

prerequisites.WHERE_TOO = ()
prerequisites.RETRY_S = 0.01
os.geteuid = lambda: 0 if sys.argv[1] == "root" else 65534
NEEDS = [
    Need("Chromium", command("chromium", "google-chrome"), "chromium", "to look", ("test",)),
    Need("zsh", command("zsh"), "zsh zsh-common", "to complete", ("test", "other")),
    Need("nginx", command("nginx"), "nginx-light", "to serve", ("other",)),
    Need("wget2", command("wget2"), "wget2", "to compare", ("other",), optional=True),
    Need("here", command("sh"), "dash", "to run"),
]
prerequisites.missing.__defaults__ = (NEEDS,)
sys.exit(prerequisites.main(sys.argv[2:]))
"""


class PrerequisitesTests(SynchronousTestCase):
    """``misc/prerequisites.py`` where little is installed."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp()).absolute()
        self.bin = self.home / "bin"
        self.bin.mkdir(parents=True)
        for name in ("sh", "mkdir", "chmod"):
            (self.bin / name).symlink_to(shutil.which(name) or name)
        self.log = self.home / "log"

    def with_apt(self) -> None:
        """Have an apt-get that notes how it is called."""
        (self.bin / "apt-get").write_text(APT_GET)
        (self.bin / "apt-get").chmod(0o755)

    def run_it(self, user: str, *targets: str) -> tuple[int, str]:
        """Return the exit status and what is said."""
        done = subprocess.run(
            [sys.executable, "-c", SCRIPTED, user, *targets],
            env={
                "PATH": str(self.bin),
                "PYTHONPATH": str(ROOT),
                "PYTHONDONTWRITEBYTECODE": "1",
                "LOG": str(self.log),
                "BIN": str(self.bin),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.assertEqual(done.stdout, "")
        return done.returncode, done.stderr

    def test_root_installs_all_with_one_call(self) -> None:
        """It waits for another program that holds a lock, and asks for dpkg's to be waited for, too."""
        self.with_apt()
        status, said = self.run_it("root", "test")
        self.assertEqual((status, said), (0, "Installing chromium, zsh, zsh-common (apt-get).\n"))
        update, again, install = self.log.read_text().splitlines()
        self.assertEqual(update, again)
        self.assertRegex(update, r"-o DPkg::Lock::Timeout=[0-9]{2,} update$")
        self.assertRegex(
            install,
            r"-o DPkg::Lock::Timeout=[0-9]{2,} install --yes --no-install-recommends"
            r" chromium zsh zsh-common$",
        )
        self.assertEqual(self.run_it("root", "test"), (0, ""))
        self.assertEqual(len(self.log.read_text().splitlines()), 3)

    def test_what_apt_get_did_not_bring(self) -> None:
        """It is named, and ``make`` goes no further; what is optional is left out."""
        self.with_apt()
        status, said = self.run_it("root", "other")
        self.assertEqual(status, 1)
        self.assertIn("wget2 is not installed, and left out.\n", said)
        self.assertRegex(said, r"(?m)^  nginx +Debian: nginx-light +to serve$")
        self.assertNotIn("Chromium", said)

    def test_another_user_gets_the_whole_list(self) -> None:
        """Everything at once, with the line that installs it; apt-get is not run."""
        self.with_apt()
        status, said = self.run_it("nobody", "test", "other")
        self.assertEqual(status, 1)
        for what in ("Chromium", "zsh", "nginx"):
            self.assertRegex(said, rf"(?m)^  {what} ")
        line = "  apt-get install --no-install-recommends chromium zsh zsh-common nginx-light\n"
        self.assertIn(line, said)
        self.assertFalse(self.log.exists())

    def test_another_system(self) -> None:
        """The same list, also for root."""
        for user in ("root", "nobody"):
            status, said = self.run_it(user, "test")
            self.assertEqual(status, 1)
            self.assertRegex(said, r"(?m)^  Chromium .*\n  zsh ")
            self.assertIn("your system's packages", said)

    def test_nothing_is_missing(self) -> None:
        """Then nothing is said."""
        self.assertEqual(self.run_it("nobody", "demo"), (0, ""))


class TableTests(SynchronousTestCase):
    """The table fits the Makefile and the README."""

    def test_targets_exist(self) -> None:
        """Every one that the table names is one of the Makefile's."""
        text = (ROOT / "Makefile").read_text()
        [phony] = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
        named = {target for need in prerequisites.NEEDS for target in need.targets}
        self.assertEqual(named - set(phony.split()) - {".venv-tahoe/.installed"}, set())

    def test_packages_are_installed_nowhere_else(self) -> None:
        """No recipe calls apt-get by itself, at the same time as another."""
        self.assertNotIn("apt-get", (ROOT / "Makefile").read_text())

    def test_they_come_first(self) -> None:
        """Also where ``make`` does several things at the same time."""
        environment = {**os.environ, "MAKEFLAGS": ""}
        for target in ("demo", "test", "trial", "mirror", "buildbot", "fresh"):
            done = subprocess.run(
                [
                    "make",
                    "-n",
                    "-j",
                    "4",
                    "VENV=none",
                    "TAHOE_VENV=none-2",
                    "PYTHON=python3",
                    target,
                ],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            commands = [line for line in done.stdout.splitlines() if "python3 -m venv" in line]
            at = done.stdout.find(f"misc/prerequisites.py {target}")
            self.assertGreaterEqual(at, 0, target)
            for each in commands:
                self.assertGreater(done.stdout.find(each), at, target)

    def test_the_readme_names_all_of_them(self) -> None:
        """What the two commands need, and no more of it."""
        text = " ".join((ROOT / "README.md").read_text().split())
        both, _, tests = text.partition("`make demo` needs nothing else.")
        for need in prerequisites.NEEDS:
            if not need.targets:
                self.assertIn(need.what, both)
            elif "test" in need.targets:
                self.assertIn(f"{need.what}", tests, need.what)


class FreshTests(SynchronousTestCase):
    """``misc/fresh.py``, as far as it can be tried without a root of its own."""

    def test_settings(self) -> None:
        """What says how to reach a package index comes along, and nothing else."""
        given = {
            "PIP_INDEX_URL": "https://example.org/simple",
            "https_proxy": "http://proxy.example.org:3128",
            "HTTPS_PROXY": "http://proxy.example.org:3128",
            "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
            "PASSWORD": "secret",
            "LANG": "C.UTF-8",
        }
        expected = {name: given[name] for name in list(given)[:4]}
        self.assertEqual(fresh.settings(given), expected)

    def test_files_that_they_name(self) -> None:
        """A certificate of one's own and a directory of wheels come along, too."""
        home = Path(self.mktemp()).absolute()
        home.mkdir()
        (home / "ca.pem").touch()
        given = {"PIP_CERT": str(home / "ca.pem"), "PIP_FIND_LINKS": f"{home} https://example.org"}
        self.assertEqual(list(fresh.named_paths(given)), [home / "ca.pem", home])
        fresh.copy(home, home / "root")
        self.assertTrue((home / "root" / home.relative_to("/") / "ca.pem").exists())

    def test_it_needs_root(self) -> None:
        """Who is not gets a sentence."""
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"import os, runpy, sys; os.geteuid = lambda: 1000; sys.argv = ['x'];"
                f"runpy.run_path({str(ROOT / 'misc' / 'fresh.py')!r}, run_name='__main__')",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("needs root", done.stderr)
