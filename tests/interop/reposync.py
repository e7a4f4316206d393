"""
Beside createrepo_c and dnf: real repositories are mirrored as ``dnf reposync`` mirrors them, run over ours it
downloads nothing, and dnf installs from the result.

Needs Debian's ``createrepo-c``, ``rpm``, ``dnf`` and ``dnf-plugins-core``, which ``make mirror``
installs.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from pipegrid.mirror import destination
from pipegrid.mirror.rpm_metadata import compare
from tests.cli.test_mirror_rpm import RpmCase
from tests.mirror.archive import Signer

SPEC = """\
Name: {name}
Epoch: {epoch}
Version: {version}
Release: {release}
Summary: nothing & <less>
License: MIT
BuildArch: noarch
%description
nothing
%files
"""

MADE = (
    ("pg-one", "0", "1.9", "1"),
    ("pg-one", "0", "1.10~rc1", "1"),
    ("pg-one", "0", "1.10", "1"),
    ("pg-two++", "1", "1", "1"),
    ("pg-two++", "0", "9", "9"),
    ("pg-three", "0", "2^git1", "1"),
    ("pg-three", "0", "2", "5"),
)
NEWEST = {"pg-one-1.10-1", "pg-two++-1-1", "pg-three-2^git1-1"}


class Repository:
    """What createrepo_c makes; ``files`` is what a web server has."""

    def __init__(self, root: Path, signer: Signer, *options: str) -> None:
        (root / "Packages").mkdir(parents=True)
        self.root = root
        self._signer = signer
        for number, (name, epoch, version, release) in enumerate(MADE):
            spec = root.parent / f"{root.name}-{number}.spec"
            spec.write_text(SPEC.format(name=name, epoch=epoch, version=version, release=release))
            top = ("--define", f"_topdir {root.parent / root.name}.build")
            into = ("--define", f"_rpmdir {root / 'Packages'}")
            run("rpmbuild", "-bb", "--quiet", *top, *into, str(spec))
        self.index(*options)

    def index(self, *options: str) -> None:
        """Make the indexes, and sign them."""
        run("createrepo_c", "--quiet", *options, str(self.root))
        repomd = self.root / "repodata" / "repomd.xml"
        Path(f"{repomd}.asc").write_bytes(self._signer.detached(repomd.read_bytes()))
        self.files = {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file()
        }


def run(*command: str, **further: Any) -> str:
    """Run a program; returns what it says."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, timeout=100, **further
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout + done.stderr


class ReposyncTests(RpmCase):
    """dnf, with directories of its own."""

    def make(self, *options: str) -> None:
        """Make a repository, and serve it."""
        repository: Any = Repository(Path(self.mktemp()).absolute(), self.signer, *options)
        self.serve(repository)

    def dnf(self, url: str, *arguments: str) -> str:
        """Run it on one repository."""
        home = Path(self.mktemp()).absolute()
        (home / "repos").mkdir(parents=True)
        (home / "dnf.conf").write_text(
            f"[main]\ngpgcheck=0\ncachedir={home}/cache\nreposdir={home}/repos\nlogdir={home}\n"
            f"persistdir={home}/state\n[pg]\nname=pg\nbaseurl={url}\n"
        )
        return run(
            *(
                "dnf",
                "--config",
                f"{home}/dnf.conf",
                f"--installroot={home}/root",
                "--releasever=1",
            ),
            *("--setopt=module_platform_id=platform:x", *arguments),
            env={**os.environ, "HOME": str(home), "LC_ALL": "C.UTF-8"},
        )

    def packages(self, root: Path) -> dict[str, bytes]:
        """The packages below a directory."""
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.rpm")}

    async def _test_forms(self) -> None:
        for options in ((), ("--xz",), ("--no-database", "--simple-md-filenames")):
            self.make(*options)
            self.dest = Path(self.mktemp()).absolute()
            status, _, err = await self.run_command(*self.arguments())
            self.assertEqual((status, self.found()), (0, self.archive.files), err)

    def test_forms(self) -> Deferred[None]:
        """What createrepo_c makes is mirrored to the byte, whatever its options."""
        return Deferred.fromCoroutine(self._test_forms())

    async def _test_side_by_side(self) -> None:
        self.make()
        for options, count in (((), len(MADE)), (("--newest-only",), len(NEWEST))):
            self.dest = Path(self.mktemp()).absolute() / "pg"
            status, _, err = await self.run_command(*self.arguments(*options))
            self.assertEqual(status, 0, err)
            theirs = Path(self.mktemp()).absolute()
            sync = ("reposync", "--repo=pg", "--download-metadata", *options)
            await deferToThread(self.dnf, self.url, *sync, f"--download-path={theirs}")
            self.assertEqual(self.packages(self.dest), self.packages(theirs / "pg"))
            self.assertEqual(len(self.packages(self.dest)), count)
            self.server.asked.clear()
            over = f"--download-path={self.dest.parent}"
            await deferToThread(self.dnf, self.url, *sync, over)
            asked = [path for path in self.server.asked if path.endswith(".rpm")]
            self.assertEqual(asked, [])
        names = {
            re.sub(r"\.noarch\.rpm$", "", os.path.basename(p)) for p in self.packages(self.dest)
        }
        self.assertEqual(names, NEWEST)

    def test_side_by_side(self) -> Deferred[None]:
        """dnf reposync leaves the same packages, also the newest only; over ours it downloads none."""
        return Deferred.fromCoroutine(self._test_side_by_side())

    async def _test_over_theirs(self) -> None:
        self.make()
        root = Path(self.mktemp()).absolute()
        sync = ("reposync", "--repo=pg", "--download-metadata", f"--download-path={root}")
        for _ in range(2):  # the second looks whether what is there is right, and notes that
            await deferToThread(self.dnf, self.url, *sync)
        self.dest = root / "pg"
        self.server.asked.clear()
        hashed: list[str] = []
        real = destination.hash_file

        def noted(fd: int, algorithm: str) -> bytes:
            hashed.append(os.readlink(f"/proc/self/fd/{fd}"))
            return real(fd, algorithm)

        self.patch(destination, "hash_file", noted)
        status, _, err = await self.run_command(*self.arguments())
        self.assertEqual(status, 0, err)
        self.assertEqual([path for path in self.server.asked if path.endswith(".rpm")], [])
        self.assertEqual([path for path in hashed if path.endswith(".rpm")], [])

    def test_over_theirs(self) -> Deferred[None]:
        """Over what reposync left, and looked at, no package is fetched or even hashed."""
        return Deferred.fromCoroutine(self._test_over_theirs())

    async def _test_readers(self) -> None:
        self.make()
        status, _, err = await self.run_command(*self.arguments())
        self.assertEqual(status, 0, err)
        out = Path(self.mktemp()).absolute()
        out.mkdir()
        url = f"file://{self.dest}"
        await deferToThread(
            self.dnf, url, "download", "--arch=noarch", f"--downloaddir={out}", "pg-one", "pg-three"
        )
        self.assertEqual(
            set(self.packages(out)), {"pg-one-1.10-1.noarch.rpm", "pg-three-2^git1-1.noarch.rpm"}
        )

    def test_readers(self) -> Deferred[None]:
        """dnf finds and downloads packages from the result."""
        return Deferred.fromCoroutine(self._test_readers())

    def test_versions(self) -> None:
        """rpm orders versions as we do, 2,000 at random."""
        seed = random.randrange(1 << 30)
        rng = random.Random(seed)
        pairs = [
            tuple(
                "".join(rng.choice("019abAZ.~^_+") for _ in range(rng.randrange(1, 8)))
                for _ in range(2)
            )
            for _ in range(2000)
        ]
        lua = "".join(
            f'print(rpm.vercmp("0:{one}-1","0:{other}-1") .. " ")' for one, other in pairs
        )
        script = Path(self.mktemp())
        script.write_text(lua)
        told = run("rpm", "--eval", f"%{{lua:dofile('{script.absolute()}')}}").split()
        self.assertEqual([compare(*pair) for pair in pairs], [int(each) for each in told], seed)
