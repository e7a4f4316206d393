"""Flat Debian archives made by tests: release file and indexes in one directory, no components."""

from __future__ import annotations

import gzip
import os
import random
from collections.abc import Mapping
from datetime import datetime, timedelta
from hashlib import md5

from tests.mirror.archive import NOW, Signer, sha


class FlatArchive:
    """
    An archive; ``files`` is how it is now.

    Args:
        directory: of the release file, ending in a slash; "": that of the archive.
        sources: whether it has any.

    Attributes:
        pool: packages, by path.
        source: files of the only source, by name; it is in ``source_directory``.
        further: other files that the release file names, by path below its directory.
    """

    def __init__(
        self,
        signer: Signer | None = None,
        *,
        directory: str = "",
        count: int = 5,
        sources: bool = True,
        by_hash: bool = False,
        packages: Mapping[str, bytes] | None = None,
        now: datetime = NOW,
    ) -> None:
        self._signer = signer
        self._by_hash = by_hash
        self._rng = random.Random(count)
        self.directory = directory
        self.date = now - timedelta(days=1)
        self.pool = dict(packages or {})
        self.source_directory = "."
        self.source = {"s_1.dsc": b"dsc", "s_1.tar.xz": b"tar"} if sources else {}
        self.further: dict[str, bytes] = {}
        self.extra_paragraphs = ""
        self._number = 0
        self._old_by_hash: dict[str, bytes] = {}
        if packages is None:
            for _ in range(count):
                self.add()
        self.publish()

    def add(self) -> str:
        """One more package, for one of two architectures; it is there after ``publish``."""
        self._number += 1
        arch = ("amd64", "arm64")[self._number % 2]
        path = f"{self.directory}{arch}/p{self._number}_1_{arch}.deb"
        self.pool[path] = self._rng.randbytes(self._rng.randrange(1, 5000))
        return path

    def packages_text(self) -> bytes:
        """``Packages``; paths begin as scanners of directories write them."""
        parts = [self.extra_paragraphs]
        for path, data in sorted(self.pool.items()):
            name, version, rest = path.rpartition("/")[2].split("_")
            parts.append(
                f"Package: {name}\nVersion: {version}\nArchitecture: {rest.removesuffix('.deb')}\n"
                f"Maintainer: T <t@example.com>\nDescription: nothing\nFilename: ./{path}\n"
                f"Size: {len(data)}\nMD5sum: {md5(data).hexdigest()}\nSHA256: {sha(data)}\n\n"
            )
        return "".join(parts).encode()

    def sources_text(self) -> bytes:
        """``Sources``."""
        rows = "".join(f" {sha(data)} {len(data)} {name}\n" for name, data in self.source.items())
        head = f"Package: s\nVersion: 1\nDirectory: {self.source_directory}\n"
        return f"{head}Checksums-Sha256:\n{rows}\n".encode()

    def publish(self) -> None:
        """Make the next generation."""
        self.date += timedelta(minutes=10)
        named = dict(self.further)
        texts = {"Packages": self.packages_text()}
        if self.source:
            texts["Sources"] = self.sources_text()
        for name, text in texts.items():
            named[name] = text
            named[name + ".gz"] = gzip.compress(text, mtime=0)
        if self._by_hash:
            for data in named.values():
                self._old_by_hash[f"by-hash/SHA256/{sha(data)}"] = data
        release = self.release_text(named)
        there = {**named, **self._old_by_hash, "Release": release}
        if self._signer is not None:
            there["InRelease"] = self._signer.inline(release)
            there["Release.gpg"] = self._signer.detached(release)
        above = "" if self.source_directory == "." else self.source_directory + "/"
        self.files = {
            **{self.directory + path: data for path, data in there.items()},
            **self.pool,
            **{os.path.normpath(above + name): data for name, data in self.source.items()},
        }

    def release_text(self, named: Mapping[str, bytes]) -> bytes:
        """The release file."""
        lines = [
            "Origin: Test",
            *([f"Suite: {self.directory}"] if self.directory else []),
            f"Date: {self.date:%a, %d %b %Y %H:%M:%S UTC}",
            *(["Acquire-By-Hash: yes"] if self._by_hash else []),
            "SHA256:",
            *(f" {sha(data)} {len(data):8} {path}" for path, data in named.items()),
        ]
        return "\n".join(lines).encode() + b"\n"
