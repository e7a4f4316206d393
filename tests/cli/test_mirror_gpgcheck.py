"""``pipegrid mirror rpm --gpgcheck`` with packages that rpmbuild makes and rpmsign signs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from misc.mirror_world.packages import make_rpms
from twisted.internet.defer import Deferred

from tests.cli.test_mirror_rpm import RpmCase
from tests.mirror.archive import Signer
from tests.mirror.rpmarchive import Made, RpmArchive

PROGRAMS = ("rpmbuild", "rpmsign", "rpmkeys")


class GpgcheckTests(RpmCase):
    """Packages of which one is not signed, or by another key."""

    if missing := [each for each in PROGRAMS if shutil.which(each) is None]:
        skip = f"{' and '.join(missing)} not installed"

    def sign(self, path: Path, signer: Signer) -> None:
        """Sign a package."""
        subprocess.run(
            [
                *("rpmsign", "--define", "_gpg_name Test", "--define", f"_gpg_path {signer.home}"),
                *("--define", f"__gpg {shutil.which('gpg')}"),
                *("--addsign", str(path)),
            ],
            check=True,
            capture_output=True,
            timeout=60,
        )

    async def _test_packages(self) -> None:
        place = Path(self.mktemp()).absolute()
        place.mkdir()
        make_rpms(place / "packages", ("right", "unsigned", "other"))
        stranger = Signer()
        self.addCleanup(stranger.close)
        paths = {each.name.partition("-")[0]: each for each in (place / "packages").iterdir()}
        self.sign(paths["right"], self.signer)
        self.sign(paths["other"], stranger)
        archive = RpmArchive(count=0)  # the index is not signed, as that of many repositories
        for name in ("right", "unsigned", "other"):
            archive.packages.append(Made(name, paths[name].read_bytes(), arch="noarch"))
        archive.publish()
        self.serve(archive)
        for ring in (self.signer.armored, self.signer.keyring):
            options = ["mirror", "rpm", str(self.dest), "--from", self.url, "--allow-unsigned"]
            options += ["--gpgcheck", "--keyring", ring]
            status, _, err = await self.run_command(*options)
            self.assertEqual((status, list(self.found())), (1, ["Packages/r/right-1-1.noarch.rpm"]))
            self.assertIn("Packages/u/unsigned-1-1.noarch.rpm could not be fetched (no sign", err)
            self.assertIn("Packages/o/other-1-1.noarch.rpm could not be fetched (rpmkeys says", err)
            shutil.rmtree(self.dest)
        for _ in range(2):  # the second run has it in its notes
            status, _, err = await self.run_command(*options, "--include=right")
            packages = [path for path in self.found() if path.endswith(".rpm")]
            self.assertEqual((status, packages), (0, ["Packages/r/right-1-1.noarch.rpm"]), err)
        self.assertEqual(len((self.dest / ".pipegrid-mirror" / "checked").read_text().split()), 2)

    def test_packages(self) -> Deferred[None]:
        """Those that no key of the ring has signed are named, and not there; the old indexes stay."""
        return Deferred.fromCoroutine(self._test_packages())

    async def _test_needs_keys(self) -> None:
        self.serve(RpmArchive())
        given = ["mirror", "rpm", str(self.dest), "--from", self.url, "--allow-unsigned"]
        status, _, err = await self.run_command(*given, "--gpgcheck")
        self.assertEqual(status, 2)
        self.assertIn("give --keyring FILE", err)

    def test_needs_keys(self) -> Deferred[None]:
        """Without a key nothing could be checked."""
        return Deferred.fromCoroutine(self._test_needs_keys())
