"""Debian archives as reprepro, apt-ftparchive, dpkg-scanpackages and aptly make them, and oddities."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import zstandard

from misc.mirror_world.case import Case
from misc.mirror_world.packages import make_debs, run
from misc.mirror_world.signing import sign_release, with_key

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": partial(gzip.compress, mtime=0),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
NAMES = ("pg-one", "pg-two", "pg-three")


def _release(root: Path, suite: str, options: tuple[str, ...], amend: Callable[[str], str]) -> None:
    directory = root / suite if suite != "." else root
    fields = {"Suite": "stable", "Codename": "stable", "Architectures": "amd64", "Origin": "T"}
    given = [f"APT::FTPArchive::Release::{key}={value}" for key, value in fields.items()]
    arguments = [word for each in (*given, *options) for word in ("-o", each)]
    text = run("apt-ftparchive", *arguments, "release", str(directory), cwd=root).decode()
    (directory / "Release").write_bytes(amend(text).encode())


def ftparchive(
    root: Path,
    *,
    components: tuple[str, ...] = ("main",),
    forms: tuple[str, ...] = ("", ".gz", ".xz"),
    dropped: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    by_hash: str = "",
    names_components: bool = True,
    amend: Callable[[str], str] = str,
    amend_index: Callable[[str], str] = str,
) -> None:
    """
    Make an archive with apt-ftparchive.

    Args:
        dropped: forms of indexes that the release file names and that are not there.
        by_hash: "also" for names by hash, too, "only" for no others.
    """
    suite = root / "dists" / "stable"
    for component in components:
        pool = root / "pool" / component
        make_debs(pool, tuple(f"{name}-{component.replace('/', '-')}" for name in NAMES))
        place = suite / component / "binary-amd64"
        place.mkdir(parents=True)
        text = amend_index(
            run("apt-ftparchive", "packages", f"pool/{component}", cwd=root).decode()
        )
        for form in forms:
            (place / f"Packages{form}").write_bytes(PACKERS[form](text.encode()))
    given = list(options)
    if names_components:
        given.append(f"APT::FTPArchive::Release::Components={' '.join(components)}")
    if by_hash:
        given.append("APT::FTPArchive::Release::Acquire-By-Hash=yes")
    _release(root, "dists/stable", tuple(given), amend)
    for path in list(suite.rglob("Packages*")):
        data = path.read_bytes()
        for kind in ("MD5", "SHA1", "SHA256", "SHA512") if by_hash else ():
            above = path.parent / "by-hash" / ("MD5Sum" if kind == "MD5" else kind)
            above.mkdir(parents=True, exist_ok=True)
            (above / hashlib.new(kind, data).hexdigest()).write_bytes(data)
        if by_hash == "only" or path.name.removeprefix("Packages") in dropped:
            path.unlink()


def flat(
    root: Path, *, directory: str = ".", scan: bool = True, forms: tuple[str, ...] = ("", ".gz")
) -> None:
    """Make a flat archive with dpkg-scanpackages, or with apt-ftparchive."""
    place = root / directory
    make_debs(place, NAMES)
    if scan:
        text = run("dpkg-scanpackages", "--multiversion", directory, cwd=root)
    else:
        text = run("apt-ftparchive", "packages", directory, cwd=root)
    for form in forms:
        (place / f"Packages{form}").write_bytes(PACKERS[form](text))
    _release(root, directory, (), str)


def reprepro(root: Path, *, components: str = "main", further: str = "") -> None:
    """Make an archive with reprepro."""
    (root / "conf").mkdir(parents=True)
    (root / "conf" / "distributions").write_text(
        f"Codename: stable\nSuite: stable\nComponents: {components}\nArchitectures: amd64\n{further}"
    )
    include = with_key if "SignWith" in further else run
    for component in components.split():
        debs = root / "debs"
        make_debs(debs, tuple(f"{name}-{component}" for name in NAMES))
        for path in sorted(debs.glob("*.deb")):
            include("reprepro", "-b", str(root), "-C", component, "includedeb", "stable", str(path))
        shutil.rmtree(debs)


def aptly(root: Path, *options: str) -> None:
    """Make an archive with aptly."""
    home = root.parent / f"{root.name}.home"
    make_debs(home / "debs", NAMES)
    command = ("aptly", "-architectures=amd64")
    run(*command, "repo", "create", "pg", home=home)
    run(*command, "repo", "add", "pg", str(home / "debs"), home=home)
    given = ("-skip-signing", "-distribution=stable", "-component=main", *options)
    run(*command, "publish", "repo", *given, "pg", home=home)
    shutil.copytree(home / ".aptly" / "public", root)


def _with(pattern: str, text: str) -> Callable[[str], str]:
    return lambda release: re.sub(pattern, text, release, count=1, flags=re.MULTILINE)


def _only(kind: str) -> tuple[str, ...]:
    others = {"MD5", "SHA1", "SHA256", "SHA512"} - {kind}
    return tuple(f"APT::FTPArchive::Release::{each}=no" for each in sorted(others))


def _crlf(text: str) -> str:
    return text.replace("\n", "\r\n")


def _leading(text: str) -> str:
    return text.replace("Filename: ", "Filename: //")


def _needless(text: str) -> str:
    return text.replace("Filename: pool/", "Filename: ./pool//./")


def _lower(text: str) -> str:
    return re.sub(r"^[A-Za-z0-9-]+:", lambda found: found[0].lower(), text, flags=re.MULTILINE)


def _repeated(text: str) -> str:
    return text.replace("Filename: ", "Filename: wrong/\nFilename: ")


def signed(make: Callable[[Path], None], directory: str) -> Callable[[Path], None]:
    """Return what makes an archive, and signs the release file of a directory."""

    def made(root: Path) -> None:
        make(root)
        sign_release(root / directory)

    return made


NESTED = ("main", "main/extra", "a/b/c")
_FTPARCHIVE: dict[str, Callable[[Path], None]] = {
    "plain": ftparchive,
    "by-hash": partial(ftparchive, by_hash="also"),
    "by-hash-only": partial(ftparchive, by_hash="only"),
    "by-hash-sha512": partial(ftparchive, by_hash="also", options=_only("SHA512")),
    "only-xz": partial(ftparchive, forms=("", ".xz"), dropped=("",)),
    "only-gz": partial(ftparchive, forms=("", ".gz"), dropped=("",)),
    "only-bz2": partial(ftparchive, forms=("", ".bz2"), dropped=("",)),
    "only-zst": partial(ftparchive, forms=("", ".zst"), dropped=("",)),
    "only-unpacked": partial(ftparchive, forms=("",)),
    "forms-missing": partial(ftparchive, forms=tuple(PACKERS), dropped=("", ".xz", ".bz2", ".zst")),
    "sha256": partial(ftparchive, options=_only("SHA256")),
    "sha512": partial(ftparchive, options=_only("SHA512")),
    "components": partial(ftparchive, components=("main", "contrib", "non-free")),
    "nested": partial(ftparchive, components=NESTED),
    "no-components": partial(ftparchive, components=("main", "contrib"), names_components=False),
    "crlf": partial(ftparchive, amend=_crlf, amend_index=_crlf),
    "lower-case": partial(ftparchive, amend=_lower, amend_index=_lower),
    "repeated-fields": partial(ftparchive, amend_index=_repeated),
    "needless-parts": partial(ftparchive, amend_index=_needless),
    "leading-slash": partial(ftparchive, amend_index=_leading),
    "date-iso": partial(ftparchive, amend=_with(r"^Date:.*", "Date: 2026-01-01T00:00:00Z")),
    "junk-line": partial(ftparchive, amend=_with(r"^SHA256:\n", "SHA256:\n nothing of use here\n")),
}
_COMPONENTS = {
    "components": ("main", "contrib", "non-free"),
    "nested": NESTED,
    "no-components": ("main", "contrib"),
    "reprepro-components": ("main", "contrib"),
}
_OTHERS: dict[str, Callable[[Path], None]] = {
    "reprepro": reprepro,
    "reprepro-components": partial(reprepro, components="main contrib"),
    "reprepro-forms": partial(reprepro, further="DebIndices: Packages Release . .gz .xz\n"),
    "aptly": aptly,
    "aptly-by-hash": lambda root: aptly(root, "-acquire-by-hash"),
}
_FLAT: dict[str, tuple[Callable[[Path], None], str]] = {
    "flat": (flat, "./"),
    "flat-below": (partial(flat, directory="ubuntu2204"), "ubuntu2204/"),
    "flat-ftparchive": (partial(flat, scan=False), "./"),
    "flat-xz": (partial(flat, forms=("", ".xz")), "./"),
}

SKIPS = {"junk-line"}
"""Of which an entry cannot be used, and is named: the status is 1."""


def cases() -> list[Case]:
    """Return all archives."""
    found = [
        Case(f"debian-{name}", make, "stable", _COMPONENTS.get(name, ("main",)), name in SKIPS)
        for name, make in {**_FTPARCHIVE, **_OTHERS}.items()
    ]
    found += [Case(f"debian-{name}", make, suite) for name, (make, suite) in _FLAT.items()]
    own: dict[str, tuple[Callable[[Path], None], str, tuple[str, ...]]] = {
        "ftparchive": (signed(ftparchive, "dists/stable"), "stable", ("main",)),
        "reprepro": (partial(reprepro, further="SignWith: yes\n"), "stable", ("main",)),
        "flat": (signed(flat, "."), "./", ()),
    }
    found += [
        Case(f"debian-signed-{name}", make, suite, components, is_signed=True)
        for name, (make, suite, components) in own.items()
    ]
    return found
