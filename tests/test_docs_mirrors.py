"""The commands of docs/how-to-mirror-archives.md, run with archives on this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from misc.mirror_world.debian import flat, signed
from misc.mirror_world.packages import make_rpms, run
from misc.mirror_world.readers import served
from misc.mirror_world.signing import public_key, sign_packages
from twisted.trial.unittest import SynchronousTestCase

from tests.mirror.archive import Archive, Signer

PAGE = Path(__file__).parent.parent / "docs" / "how-to-mirror-archives.md"
RING = "/usr/share/keyrings/debian-archive-keyring.gpg"
UDEBS = "main/debian-installer/binary-amd64/Packages"
METALINK = """<?xml version="1.0" encoding="utf-8"?>
<metalink version="3.0" xmlns="http://www.metalinker.org/"><files><file name="repomd.xml">
<size>{size}</size><verification><hash type="sha256">{hash}</hash></verification>
<resources>
<url protocol="http" preference="100">{url}/repodata/repomd.xml</url></resources></file></files></metalink>
"""


def sections() -> dict[str, list[str]]:
    """Return the commands of each section by its heading."""
    parts = re.split(r"^## (.+)\n", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    blocks = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {head: blocks.findall(text) for head, text in zip(parts[1::2], parts[2::2], strict=True)}


def lacking(*programs: str) -> str:
    """Return why a test is left out; "": it is not."""
    missing = [each for each in programs if shutil.which(each) is None]
    return f"{' and '.join(missing)} not installed" if missing else ""


class MirrorPageTests(SynchronousTestCase):
    """Each section, as a newcomer would paste it."""

    def setUp(self) -> None:
        self.place = Path(self.mktemp()).absolute()
        self.place.mkdir()
        self.signer = Signer()
        self.addCleanup(self.signer.close)
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)

    def serve(self, directory: Path) -> str:
        """Serve a directory until the test ends; returns its URL."""
        return self.stack.enter_context(served(directory))

    def debian(self) -> str:
        """Serve an archive with sources and a udeb; returns its URL."""
        archive = Archive(self.signer, count=4, now=datetime.now(timezone.utc))
        path, data = "pool/main/u/u/u_1_amd64.udeb", b"a udeb"
        archive.pool[path] = data
        archive.further[UDEBS] = (
            f"Package: u\nVersion: 1\nArchitecture: amd64\nFilename: {path}\nSize: {len(data)}\n"
            f"SHA256: {sha256(data).hexdigest()}\n\n"
        ).encode()
        archive.publish()
        root = self.place / "debian"
        for name, content in archive.files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        return self.serve(root)

    def run_section(self, head: str, named: Mapping[str, str]) -> None:
        """Run its commands in one shell, with other names for what they name."""
        blocks = sections()[head]
        self.assertTrue(blocks)
        script = "set -e\n" + "".join(blocks)
        for before, after in {
            **named,
            "/srv/": f"{self.place}/",
            "/media/": f"{self.place}/",
        }.items():
            script = script.replace(before, after)
        programs = self.place / "bin"
        programs.mkdir()
        program = programs / "pipegrid"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pipegrid.cli "$@"\n')
        program.chmod(0o755)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.place,
            env={"HOME": str(self.place), "PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def count(self, directory: str, *endings: str) -> int:
        """How many files with such names are there."""
        return sum(path.name.endswith(endings) for path in (self.place / directory).rglob("*"))

    def test_debian(self) -> None:
        """Packages, udebs and sources are there."""
        named = {"https://deb.debian.org/debian": self.debian(), RING: self.signer.keyring}
        self.run_section("Debian with its installer and sources", named)
        where = "mirror/debian"
        self.assertEqual([self.count(where, each) for each in (".deb", ".udeb", ".dsc")], [4, 1, 3])

    def test_vendor(self) -> None:
        """A flat archive, and packages that alone are signed."""
        signed(flat, ".")(self.place / "deb")
        self.rpms()
        shutil.copy(public_key(), self.place / "vendor.asc")
        self.run_section("A vendor", {"https://packages.vendor.example": self.serve(self.place)})
        self.assertEqual(self.count("mirror/vendor-deb", ".deb"), 3)
        self.assertEqual(self.count("mirror/vendor-rpm", ".rpm"), 2)

    def rpms(self) -> Path:
        """Make a repository of two signed packages; returns where."""
        root = self.place / "rpm"
        make_rpms(root / "Packages", ("pg-one", "pg-two"))
        sign_packages(root)
        run("createrepo_c", "--quiet", str(root))
        return root

    def test_fedora(self) -> None:
        """A metalink leads to the mirror, and says what its ``repomd.xml`` is."""
        root = self.rpms()
        url = self.serve(root)
        data = (root / "repodata" / "repomd.xml").read_bytes()
        text = METALINK.format(size=len(data), hash=sha256(data).hexdigest(), url=url)
        (root / "metalink").write_text(text)
        named = {
            "https://mirrors.fedoraproject.org/metalink?repo=fedora-41&arch=x86_64": f"{url}/metalink",
            "/etc/pki/rpm-gpg/RPM-GPG-KEY-fedora-41-x86_64": str(public_key()),
        }
        self.run_section("Fedora by metalink", named)
        self.assertEqual(self.count("mirror/fedora", ".rpm"), 2)

    def test_without_a_network(self) -> None:
        """From a mirror to a disk, to a mirror, to a grid, and back."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        named = {
            "https://deb.debian.org/debian": self.debian(),
            RING: self.signer.keyring,
            "8080": port,
        }
        self.run_section("Without a network", named)
        for each in ("disk/debian", "inside/debian", "other/debian"):
            self.assertEqual(self.count(each, ".deb"), 4, each)

    if skip_vendor := lacking("dpkg-scanpackages", "rpmbuild", "rpmsign", "createrepo_c"):
        test_vendor.skip = test_fedora.skip = skip_vendor  # type: ignore[attr-defined]
