"""
Package archives to mirror: made up, but of the shape and the sizes of real ones.

    pool/main/f/f-source00005/f-package00017_1.17-1_amd64.deb    what is fetched
    dists/sid/Release, dists/sid/main/binary-amd64/…             for tools that read Debian's indexes

**Sizes** follow a log-normal distribution, as those of real archives nearly do: most files are small, most
bytes are in large ones. They are its quantiles rather than draws, so that every seed gives the same sizes
in another order. **Contents** are random, so that nothing on the way can compress them.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import random
from collections.abc import Sequence
from email.utils import formatdate
from math import exp
from pathlib import Path
from statistics import NormalDist

import attrs

SMALL_FILE_BYTES = 64 << 10
SUITE = "sid"
COMPONENT = "main"
PACKAGES_OF_A_SOURCE = 3
ARCHITECTURE = "amd64"


@attrs.frozen
class Shape:
    """
    So many files, with so many bytes in all.

    Attributes:
        spread: standard deviation of the logarithm of the sizes: the larger, the more of them are small.
    """

    name: str
    files: int
    size_bytes: int
    spread: float

    def sizes(self) -> list[int]:
        """Return the sizes of the files, the smallest first."""
        normal = NormalDist(0.0, self.spread)
        raw = [exp(normal.inv_cdf((number + 0.5) / self.files)) for number in range(self.files)]
        scale = self.size_bytes / sum(raw)
        return [max(1, round(each * scale)) for each in raw]


SMALL = Shape("small", 1_200, 32_000_000, 1.75)
LARGE = Shape("large", 6_200, 620_000_000, 2.35)
TINY = Shape("tiny", 60, 400_000, 1.5)


@attrs.frozen
class Package:
    """One file of an archive."""

    name: str
    path: str
    size: int
    sha256: str
    md5: str

    def line(self) -> str:
        """Return its line of a list."""
        return f"{self.sha256} {self.size} {self.path}\n"


@attrs.define
class Archive:
    """
    One archive on the disk.

    Attributes:
        root: what a web server serves.
        packages: what is to be fetched from it.
    """

    root: Path
    packages: list[Package]

    @property
    def list_path(self) -> Path:
        """Where the list of all files is; beside the root, nobody serves it."""
        return self.root.with_name(self.root.name + "-files.txt")

    @property
    def size_bytes(self) -> int:
        return sum(each.size for each in self.packages)

    def write_list(self, path: Path, packages: Sequence[Package] | None = None) -> Path:
        """Write the list of some of the files, or of all."""
        chosen = self.packages if packages is None else packages
        path.write_text("".join(each.line() for each in chosen), "utf-8")
        return path

    def write_indexes(self) -> None:
        """Write what Debian's tools read."""
        (self.list_path).write_text("".join(each.line() for each in self.packages), "utf-8")
        suite = self.root / "dists" / SUITE
        text = "\n".join(_paragraph(each) for each in self.packages).encode("utf-8")
        sums = {}
        for architecture, content in ((ARCHITECTURE, text), ("all", b"")):
            directory = suite / COMPONENT / f"binary-{architecture}"
            directory.mkdir(parents=True, exist_ok=True)
            for suffix, data in (
                ("", content),
                (".gz", gzip.compress(content, 6, mtime=0)),
                (".xz", lzma.compress(content, preset=1)),
            ):
                path = directory / f"Packages{suffix}"
                path.write_bytes(data)
                sums[path.relative_to(suite).as_posix()] = data
        (suite / "Release").write_text(_release(sums), "utf-8")
        self._write_sources(suite / COMPONENT / "source")

    def _write_sources(self, directory: Path) -> None:
        """Name the same files as those of source packages, for a tool that mirrors nothing else."""
        directory.mkdir(parents=True, exist_ok=True)
        sources: dict[str, list[Package]] = {}
        for each in self.packages:
            sources.setdefault(each.path.rpartition("/")[0], []).append(each)
        text = "\n".join(_source_paragraph(*each) for each in sources.items())
        packed = gzip.compress(text.encode("utf-8"), 6, mtime=0)
        (directory / "Sources.gz").write_bytes(packed)

    def change(self, count: int, rng: random.Random) -> list[Package]:
        """Replace the contents of so many files, and their entries; returns those."""
        chosen = rng.sample(range(len(self.packages)), count)
        for number in chosen:
            old = self.packages[number]
            self.packages[number] = _write(self.root, old.name, old.path, old.size, rng)
        self.write_indexes()
        return [self.packages[number] for number in sorted(chosen)]


def make_archive(root: Path, shape: Shape, rng: random.Random) -> Archive:
    """Write an archive."""
    sizes = shape.sizes()
    rng.shuffle(sizes)
    packages = []
    for number, size in enumerate(sizes):
        source = number // PACKAGES_OF_A_SOURCE
        letter = "abcdefghijklmnopqrstuvwxyz"[source % 26]
        name = f"{letter}-package{number:05}"
        file = f"{name}_1.{number % 90}-1_{ARCHITECTURE}.deb"
        path = f"pool/{COMPONENT}/{letter}/{letter}-source{source:05}/{file}"
        packages.append(_write(root, name, path, size, rng))
    archive = Archive(root, packages)
    archive.write_indexes()
    return archive


def wrong(packages: Sequence[Package], tree: Path) -> list[str]:
    """Return the paths of what is missing below a directory, or is not what it should be."""
    return [each.path for each in packages if not _is_right(tree / each.path, each)]


def _is_right(path: Path, package: Package) -> bool:
    try:
        return sha256_of(path) == package.sha256
    except OSError:
        return False


def sha256_of(path: Path) -> str:
    """
    Return the hash of a file, in hexadecimal digits; ``hashlib.file_digest`` is not in Python 3.10.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _write(root: Path, name: str, path: str, size: int, rng: random.Random) -> Package:
    data = rng.randbytes(size)
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)  # it may be linked to by another mirror's tree
    place.write_bytes(data)
    return Package(
        name, path, size, hashlib.sha256(data).hexdigest(), hashlib.md5(data).hexdigest()
    )


def _paragraph(package: Package) -> str:
    version = package.path.rsplit("_", 2)[1]
    return (
        f"Package: {package.name}\n"
        f"Version: {version}\n"
        f"Architecture: {ARCHITECTURE}\n"
        "Maintainer: Nobody <nobody@example.org>\n"
        "Section: misc\n"
        "Priority: optional\n"
        f"Filename: {package.path}\n"
        f"Size: {package.size}\n"
        f"MD5sum: {package.md5}\n"
        f"SHA256: {package.sha256}\n"
        "Description: random bytes\n"
    )


def _source_paragraph(directory: str, packages: Sequence[Package]) -> str:
    files = (f" {each.md5} {each.size} {each.path.rpartition('/')[2]}\n" for each in packages)
    name = directory.rpartition("/")[2]
    return f"Package: {name}\nDirectory: {directory}\nFiles:\n{''.join(files)}"


def _release(files: dict[str, bytes]) -> str:
    lines = [
        "Origin: Example",
        "Label: Example",
        f"Suite: {SUITE}",
        f"Codename: {SUITE}",
        f"Date: {formatdate(usegmt=True)}",
        f"Architectures: all {ARCHITECTURE}",
        f"Components: {COMPONENT}",
        "Description: made up",
    ]
    for title, algorithm in (("MD5Sum", "md5"), ("SHA256", "sha256")):
        lines.append(f"{title}:")
        lines += [
            f" {hashlib.new(algorithm, data).hexdigest()} {len(data)} {path}"
            for path, data in files.items()
        ]
    return "\n".join(lines) + "\n"
