"""RPM repositories as createrepo_c and its companions make them, with its options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from misc.mirror_world.case import Case
from misc.mirror_world.packages import make_rpms, run
from misc.mirror_world.signing import sign_packages, sign_repomd

NAMES = ("pg-one", "pg-two++", "pg-three")
UPDATEINFO = """<?xml version="1.0" encoding="UTF-8"?>
<updates><update from="t" status="stable" type="bugfix" version="1"><id>T-1</id><title>t</title></update>
</updates>
"""
COMPS = """<?xml version="1.0" encoding="UTF-8"?>
<comps><group><id>pg</id><name>pg</name><packagelist>
<packagereq type="mandatory">pg-one</packagereq></packagelist></group></comps>
"""


def createrepo(
    root: Path, *options: str, directory: str = "Packages", names: tuple[str, ...] = NAMES
) -> None:
    """Make a repository with createrepo_c."""
    make_rpms(root / directory, names)
    run("createrepo_c", "--quiet", *options, str(root))


def with_groups(root: Path) -> None:
    """Make one that has groups."""
    root.mkdir()
    (root / "comps.xml").write_text(COMPS)
    createrepo(root, "--groupfile=comps.xml")


def with_further(root: Path) -> None:
    """Make one with advisories and a kind of data that nobody knows."""
    createrepo(root)
    for name, text in (("updateinfo.xml", UPDATEINFO), ("oddities", "anything")):
        path = root.parent / f"{root.name}.{name}"
        path.write_text(text)
        run("modifyrepo_c", f"--mdtype={name.partition('.')[0]}", str(path), str(root / "repodata"))


def twice(root: Path) -> None:
    """Make one that is made again, and keeps the indexes of before."""
    createrepo(root)
    make_rpms(root / "more", ("pg-four",))
    run("createrepo_c", "--quiet", "--update", "--retain-old-md=2", str(root))


def signed(root: Path, *options: str) -> None:
    """Make one that is signed: packages, and ``repomd.xml``."""
    make_rpms(root / "Packages", NAMES)
    sign_packages(root / "Packages")
    run("createrepo_c", "--quiet", *options, str(root))
    sign_repomd(root)


def with_blanks(root: Path) -> None:
    """Make one whose packages are in a directory with a blank in its name."""
    createrepo(root, directory="Some Packages")


_MADE: dict[str, Callable[[Path], None]] = {
    "plain": createrepo,
    "xz": lambda root: createrepo(root, "--xz"),
    "bz2": lambda root: createrepo(root, "--general-compress-type=bz2"),
    "general-xz": lambda root: createrepo(root, "--general-compress-type=xz"),
    "no-database": lambda root: createrepo(root, "--no-database"),
    "simple-names": lambda root: createrepo(root, "--simple-md-filenames"),
    "sha512": lambda root: createrepo(root, "--checksum=sha512"),
    "sha384": lambda root: createrepo(root, "--checksum=sha384"),
    "revision": lambda root: createrepo(root, "--revision=1", "--set-timestamp-to-revision"),
    "tags": lambda root: createrepo(root, "--distro=cpe:/o:t,T", "--content=a", "--repo=b"),
    "skip-stat": lambda root: createrepo(root, "--skip-symlinks", "--workers=1"),
    "at-the-top": partial(createrepo, directory="."),
    "zchunk": lambda root: createrepo(root, "--zck"),
    "prefix": lambda root: createrepo(root, "--location-prefix=./"),
    "doubled-slash": lambda root: createrepo(root, "--location-prefix=.//./"),
    "groups": with_groups,
    "further": with_further,
    "twice": twice,
    "blanks": with_blanks,
}


def cases() -> list[Case]:
    """Return all repositories."""
    found = [Case(f"rpm-{name}", make) for name, make in _MADE.items()]
    return [
        *found,
        Case("rpm-signed", signed, is_signed=True),
        Case("rpm-signed-sha512", lambda root: signed(root, "--checksum=sha512"), is_signed=True),
    ]
