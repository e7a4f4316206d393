"""
Control files, release files and lists of patches of an archive, cut anywhere: each reader raises its one
error; the cuts change nothing; no path leads out of a mirror, and what proves a file is no weak hash.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import pairwise

from misc.fuzz.choices import Choices
from pipegrid.mirror.archive_file import DIGEST_BYTES, MAX_SIZE_BYTES, ArchiveFile, BadEntry
from pipegrid.mirror.debian_metadata import (
    packages,
    paragraphs,
    read_patch_index,
    read_release,
    sources,
)

_FIELDS = frozenset(("Package", "Filename", "Size", "SHA256", "Files", "Directory"))
_HASH = "0123456789abcdef" * 4


def run(data: bytes) -> None:
    """Let the first bytes say where the rest is cut, and read it as everything it might be."""
    choices = Choices(data)
    cuts = [choices.number(2) for _ in range(choices.below(6))]
    text = choices.rest()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    for read in (packages, sources):
        whole = _outcome(lambda read=read: list(read([text], "x")))  # type: ignore[misc]
        assert _outcome(lambda read=read: list(read(pieces, "x"))) == whole, "cuts change it"  # type: ignore[misc]
        if isinstance(whole, list):
            _check(whole)
    whole = _outcome(lambda: list(paragraphs([text], _FIELDS, "x")))
    assert _outcome(lambda: list(paragraphs(pieces, _FIELDS, "x"))) == whole, "cuts change it"
    try:
        release = read_release(text, "x")
    except BadEntry as error:
        assert str(error)
    else:
        _check(release.files.values())
        assert all(path == each.path for path, each in release.files.items())
        assert release.date is None or release.date.tzinfo is not None
    try:
        index = read_patch_index(text, "main/P.diff", "x")
    except BadEntry as error:
        assert str(error)
    else:
        _check(step.packed for step in index.steps if step.packed is not None)
        assert index.chain(index.current) == ()
        for step in index.steps:
            assert index.chain(step.before) is not None


def _outcome(read: Callable[[], list[object]]) -> object:
    try:
        return read()
    except BadEntry as error:
        assert str(error), "a refusal that says nothing"
        assert "\n" not in str(error), "a refusal of several lines"
        return str(error)


def _check(found: Iterable[object]) -> None:
    for each in found:
        assert isinstance(each, ArchiveFile)
        assert os.path.normpath(f"/root/{each.path}") == f"/root/{each.path}", "it leads elsewhere"
        assert len(each.digest) == DIGEST_BYTES[each.algorithm]
        assert each.size is not None
        assert 0 <= each.size <= MAX_SIZE_BYTES


def seeds() -> dict[str, bytes]:
    """Return one file of each kind, uncut and cut."""
    made = {
        "packages": f"Package: a\nFilename: pool/a.deb\nSize: 3\nMD5sum: 0\nSHA256: {_HASH}\n\n"
        f"Package: b\nFilename: ./b.deb\nSize: 0\nSHA512: {_HASH * 2}\n",
        "sources": "Package: s\nDirectory: pool/s\nFiles:\n 00 3 s.dsc\n"
        f"Checksums-Sha256:\n {_HASH} 3 s.dsc\n",
        "release": "Suite: sid\nComponents: main\nDate: Sat, 28 Feb 2026 08:12:33 UTC\n"
        f"Acquire-By-Hash: yes\nSHA256:\n {_HASH} 3 main/Packages.xz\n {_HASH} 0 x\n",
        "patches": f"SHA256-Current: {_HASH} 3\nSHA256-History:\n {_HASH} 3 one\nSHA256-Download:\n"
        f" {_HASH} 2 one.gz\nX-Patch-Precedence: merged\n",
        "leads-out": f"Filename: ../a\nSize: 3\nSHA256: {_HASH}\n",
        "page": "<html>Please log in</html>\n",
    }
    found = {name: b"\x00" + text.encode() for name, text in made.items()}
    found["cut"] = b"\x03\x00\x10\x00\x45\x00\x77" + made["packages"].encode()
    return found
