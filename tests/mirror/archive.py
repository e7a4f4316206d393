"""Debian archives made by tests: release file, indexes, patches, packages; a generation after the other."""

from __future__ import annotations

import gzip
import lzma
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from hashlib import md5, sha256
from pathlib import Path

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
SUITE = "dists/sid"
BINARY = "main/binary-amd64/Packages"
SOURCES = "main/source/Sources"


class Signer:
    """A key of our own; to be closed. gpg has its directory, and an agent that ends with it."""

    def __init__(self, expires: str = "never", at: str | None = None) -> None:
        self.home = tempfile.mkdtemp(prefix="pg-key-")
        os.chmod(self.home, 0o700)
        self._at = [] if at is None else ["--faked-system-time", at]
        self._gpg("--quick-generate-key", "Test <test@example.com>", "ed25519", "sign", expires)
        self.keyring = os.path.join(self.home, "ring.gpg")
        Path(self.keyring).write_bytes(self._gpg("--export"))
        self.armored = os.path.join(self.home, "ring.asc")
        Path(self.armored).write_bytes(self._gpg("--armor", "--export"))

    def _gpg(self, *arguments: str, data: bytes = b"") -> bytes:
        command = [
            "gpg",
            "--homedir",
            self.home,
            "--batch",
            "--quiet",
            "--pinentry-mode",
            "loopback",
        ]
        command += ["--passphrase", "", "--no-tty", *self._at, *arguments]
        said = b""
        for _ in range(
            3
        ):  # the agent that it starts is not always there in time, beside other tests
            done = subprocess.run(command, input=data, capture_output=True, timeout=60)
            if done.returncode == 0:
                return done.stdout
            said = done.stderr
        raise AssertionError(f"gpg: {said.decode('utf-8', 'replace')}")

    def inline(self, data: bytes, *options: str) -> bytes:
        """Return the text with its signature around it."""
        return self._gpg("--clearsign", *options, data=data)

    def detached(self, data: bytes) -> bytes:
        """Return the signature alone."""
        return self._gpg("--armor", "--detach-sign", data=data)

    def close(self) -> None:
        """Remove it, and end its agent."""
        subprocess.run(
            ["gpgconf", "--homedir", self.home, "--kill", "all"], capture_output=True, timeout=60
        )
        shutil.rmtree(self.home, ignore_errors=True)


def sha(data: bytes) -> str:
    """SHA-256 in hex."""
    return sha256(data).hexdigest()


@lru_cache(maxsize=500)
def ed_script(old: bytes, new: bytes) -> bytes:
    """Return what diff --ed would say."""
    with tempfile.TemporaryDirectory() as directory:
        for name, data in (("old", old), ("new", new)):
            Path(directory, name).write_bytes(data)
        return subprocess.run(
            ["diff", "--ed", f"{directory}/old", f"{directory}/new"],
            capture_output=True,
            timeout=60,
        ).stdout


class Archive:
    """
    An archive; ``files`` is how it is now.

    Args:
        signer: None: unsigned.
        by_hash: whether indexes are there by hash, too.
        patches: whether indexes have patches.
        filler: bytes in each package's paragraph that say nothing, so that indexes are large.
        merged: patches lead to the newest version each.

    Attributes:
        pool: packages and sources, by path.
        further: other files that the release file names, by path below the suite.
    """

    def __init__(
        self,
        signer: Signer | None = None,
        *,
        count: int = 20,
        seed: int = 1,
        by_hash: bool = True,
        patches: bool = False,
        filler: int = 0,
        merged: bool = False,
        packages: Mapping[str, bytes] | None = None,
        now: datetime = NOW,
    ) -> None:
        self._signer = signer
        self._rng = random.Random(seed)
        self._by_hash = by_hash
        self._patches = patches
        self._filler = filler
        self._merged = merged
        self._number = 0
        self.date = now - timedelta(days=1)
        self.valid_days = 7.0
        self.history: dict[str, list[bytes]] = {BINARY: [], SOURCES: []}
        self.further: dict[str, bytes] = {}
        self.pool: dict[str, bytes] = dict(packages or {})
        self._texts: dict[str, str] = {}
        self.extra_paragraphs = ""
        self.files: dict[str, bytes] = {}
        self._old_by_hash: dict[str, bytes] = {}
        if packages is None:
            for _ in range(count):
                self.add()
            for _ in range(count // 2 if filler else 3):
                self.add_source()
        self.publish()

    def add(self) -> str:
        """One more package; returns its path. It is there after ``publish``."""
        self._number += 1
        name = f"p{self._number}"
        path = f"pool/main/p/{name}/{name}_1~rc1+b{self._number}_amd64.deb"
        self.pool[path] = self._rng.randbytes(self._rng.randrange(5000))
        self._texts[path] = self._rng.randbytes(self._filler // 2).hex()
        return path

    def add_source(self) -> None:
        """One more source."""
        self._number += 1
        for ending in ("dsc", "tar.xz"):
            path = f"pool/main/s/s{self._number}/s{self._number}_1.{ending}"
            self.pool[path] = self._rng.randbytes(500)
        self._texts[os.path.dirname(path)] = self._rng.randbytes(self._filler // 2).hex()

    def drop(self, path: str) -> None:
        """One package less, after ``publish``."""
        del self.pool[path]

    def packages_text(self) -> bytes:
        """``Packages``, unpacked."""
        parts = [self.extra_paragraphs]
        for path in sorted(each for each in self.pool if each.endswith(".deb")):
            data = self.pool[path]
            name, version, _ = path.rpartition("/")[2].split("_")
            parts.append(
                f"Package: {name}\nVersion: {version}\nArchitecture: amd64\n"
                f"Maintainer: T <t@example.com>\nDescription: nothing {self._texts.get(path, '')}\n"
                f" more of it\nFilename: {path}\nSize: {len(data)}\nMD5sum: {md5(data).hexdigest()}\n"
                f"SHA256: {sha(data)}\n\n"
            )
        return "".join(parts).encode()

    def sources_text(self) -> bytes:
        """``Sources``, unpacked."""
        parts = []
        for directory in sorted(
            {os.path.dirname(p) for p in self.pool if p.startswith("pool/main/s/")}
        ):
            files = [path for path in sorted(self.pool) if path.startswith(directory + "/")]
            lines = [
                f" {digest(self.pool[path])} {len(self.pool[path])} {os.path.basename(path)}\n"
                for digest in (lambda data: md5(data).hexdigest(), sha)
                for path in files
            ]
            parts.append(
                f"Package: {os.path.basename(directory)}\nBinary: x{self._texts.get(directory, '')}\n"
                "Version: 1\n"
                f"Directory: {directory}\nFiles:\n{''.join(lines[: len(files)])}"
                f"Checksums-Sha256:\n{''.join(lines[len(files) :])}\n"
            )
        return "".join(parts).encode()

    def publish(self) -> None:
        """Make the next generation; what mirrors have is then ``files``."""
        self.date += timedelta(minutes=10)
        named: dict[str, bytes] = dict(self.further)
        for base, text in ((BINARY, self.packages_text()), (SOURCES, self.sources_text())):
            named[base] = text
            named[base + ".xz"] = lzma.compress(text, preset=0)
            named[base + ".gz"] = gzip.compress(text, mtime=0)
        there: dict[str, bytes] = {}
        if self._patches:
            for base, history in self.history.items():
                if not history or history[-1] != named[base]:
                    history.append(named[base])
                there.update(self._patch_files(base, history, named))
        there.update({path: data for path, data in named.items() if path not in self.history})
        if self._by_hash:
            for path, data in list(there.items()):
                if path in named:
                    self._old_by_hash[f"{os.path.dirname(path)}/by-hash/SHA256/{sha(data)}"] = data
            there.update(self._old_by_hash)
        release = self.release_text(named)
        there["Release"] = release
        if self._signer is not None:
            there["InRelease"] = self._signer.inline(release)
            there["Release.gpg"] = self._signer.detached(release)
        self.files = {
            **{f"{SUITE}/{path}": data for path, data in there.items()},
            **self.pool,
        }

    def release_text(self, named: Mapping[str, bytes]) -> bytes:
        """The release file."""
        until = self.date + timedelta(days=self.valid_days)
        form = "%a, %d %b %Y %H:%M:%S UTC"
        lines = [
            "Origin: Test",
            "Suite: sid",
            "Codename: sid",
            "Architectures: all amd64",
            "Components: main",
            f"Date: {self.date:{form}}",
            f"Valid-Until: {until:{form}}",
            *(["Acquire-By-Hash: yes"] if self._by_hash else []),
            "MD5Sum:",
            *(f" {md5(data).hexdigest()} {len(data):8} {path}" for path, data in named.items()),
            "SHA256:",
            *(f" {sha(data)} {len(data):8} {path}" for path, data in named.items()),
        ]
        return "\n".join(lines).encode() + b"\n"

    def _patch_files(
        self, base: str, history: list[bytes], named: dict[str, bytes]
    ) -> dict[str, bytes]:
        made: dict[str, bytes] = {}
        rows: dict[str, list[str]] = {"History": [], "Patches": [], "Download": []}
        for number, old in enumerate(history[:-1]):
            patch = ed_script(old, history[-1 if self._merged else number + 1])
            name = f"2026-03-01-{number:04}.{len(history) if self._merged else 0:02}"
            packed = gzip.compress(patch, mtime=0)
            made[f"{base}.diff/{name}.gz"] = packed
            rows["History"].append(f" {sha(old)} {len(old)} {name}")
            rows["Patches"].append(f" {sha(patch)} {len(patch)} {name}")
            rows["Download"].append(f" {sha(packed)} {len(packed)} {name}.gz")
        if made:
            text = f"SHA256-Current: {sha(history[-1])} {len(history[-1])}\n"
            text += "".join(
                f"SHA256-{key}:\n" + "\n".join(each) + "\n" for key, each in rows.items()
            )
            if self._merged:
                text += "X-Patch-Precedence: merged\n"
            named[f"{base}.diff/Index"] = text.encode()
        return made


_FIELD = re.compile(r"^(Filename|Size|SHA256): (.*)$", re.MULTILINE)


def check_readers(root: Path) -> int:
    """
    Raise if an index that can be seen names a file that is not there, or another; returns how many it names.

    Read here in another way than the program does.
    """
    count = 0
    for path in root.glob("dists/*/*/binary-*/Packages*"):
        if path.is_file():
            count += _check_named(root, path)
    for path in root.glob("dists/*/*/binary-*/by-hash/SHA256/*"):  # also those of before
        _check_named(root, path)
    for suite in root.glob("dists/*"):
        for name in ("InRelease", "Release"):  # the first that is there is what readers take
            if (suite / name).exists():
                check_by_hash(suite / name)
                break
    return count


def _check_named(root: Path, index: Path) -> int:
    """Raise if an index names a file that is not there, or another; returns how many it names."""
    data = index.read_bytes()
    text = {b"\xfd7": lzma.decompress, b"\x1f\x8b": gzip.decompress}.get(data[:2], bytes)(data)
    count = 0
    for paragraph in text.decode().split("\n\n"):
        found = dict(_FIELD.findall(paragraph))
        if found:
            path = root / found["Filename"]
            assert path.exists(), (
                f"{index} names {path}"
            )  # what is raised here nobody takes for his own
            package = path.read_bytes()
            assert (len(package), sha(package)) == (int(found["Size"]), found["SHA256"]), found
            count += 1
    return count


def check_by_hash(release: Path) -> None:
    """Raise if an index that is kept is not there by the hash of the release file that can be seen."""
    text = release.read_text()
    if "Acquire-By-Hash: yes" not in text:
        return
    for digest, name in re.findall(r"^ ([0-9a-f]{64}) +[0-9]+ (\S+)$", text, re.MULTILINE):
        if (release.parent / name).exists():
            path = release.parent / os.path.dirname(name) / "by-hash" / "SHA256" / digest
            assert sha(path.read_bytes()) == digest, path
