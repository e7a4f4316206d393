"""
Rebuilding of the indexes of a Debian archive: the new ones name only the fetched files, and are signed here.

The archive's staged indexes are read. For each one, a new index is written in the forms that the release file
names. It contains the paragraphs whose files exist and that the filters of any run select. The release file
keeps its fields and dates, and names the new indexes and the other kept files. The archive's own indexes are
kept in ``UPSTREAM``, so that the next run does not fetch them again.

All functions are synchronous, for the destination's thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from hashlib import sha256
from typing import NamedTuple

from pipegrid.mirror import HIDDEN
from pipegrid.mirror.debian_index_selection import (
    READ,
    Index,
    base_of,
    below,
    index_of,
    selected_by,
)
from pipegrid.mirror.debian_index_update import PackedIndex
from pipegrid.mirror.debian_metadata import MAX_RELEASE_BYTES, read_release
from pipegrid.mirror.debian_release_files import OwnNames, Suite, unsigned_part
from pipegrid.mirror.destination import STAGED, Destination
from pipegrid.mirror.package_filter import ALL
from pipegrid.mirror.signatures import GpgKey

UPSTREAM = f"{HIDDEN}/upstream"
"""The directory in which the archive's own indexes are kept if rebuilt indexes are published."""

RECORD = "reindexed"
"""In ``HIDDEN``: the record of the release files that the indexes were rebuilt from."""

MAX_RECORD_BYTES = 1 << 20
_FIELDS = {"sha256": "SHA256", "sha512": "SHA512"}
_DROPPED = frozenset(("md5sum", "sha1", "sha256", "sha384", "sha512", "signed-by"))
"""Fields of the archive's release file that a new one omits: hashes of the indexes, and signing keys."""


def prepare(
    destination: Destination, indexes: Sequence[Index], apart: Sequence[Index]
) -> list[Index]:
    """
    Stage those of the indexes that earlier runs have kept in ``UPSTREAM``, so that they are not fetched; of
    each index, one form suffices.

    Returns:
        the indexes of other runs in the packed form; lists of patches are left out, since they do not apply
            to rebuilt indexes.
    """
    others = []
    for index in apart:
        if index.kind in ("packages", "sources") and index.held != "packed":
            base = index.suite.within(base_of(index.path))
            index = index_of(index.suite, index.kind, base, "packed")
        if index.kind != "patches":
            others.append(index)
    for index in (*indexes, *others):
        if index.kind:
            index.fallbacks = [*index.forms[1:], *index.fallbacks]
            index.forms = index.forms[:1]
        take_back(destination, (form.path for form in (*index.forms, *index.fallbacks)))
    return others


def rebuilt(
    destination: Destination,
    suites: Sequence[Suite],
    indexes: Sequence[Index],
    key: GpgKey,
) -> list[Suite]:
    """
    Stage new indexes instead of the archive's; return the suites with their new release files.

    Args:
        indexes: all indexes of the suites; each is changed to describe the new one.

    Raises:
        MirrorError, SigningFailed: the disk is full, or gpg made no signature.
        BadEntry: an index cannot be read.
    """
    own = OwnNames(suites, (form for index in indexes for form in index.forms))
    algorithms = {suite.directory: _algorithms(suite) for suite in suites}
    made = {
        number: _written(destination, index, number, own, algorithms[index.suite.directory])
        for number, index in enumerate(indexes)
        if index.kind
    }
    # All of the archive's indexes have been read, so the new ones may replace them.
    upstream = {index.forms[0].path for index in indexes if index.kind}
    keep_aside(destination, upstream, *(suite.place("") for suite in suites))
    for outputs in made.values():
        for output in outputs:
            output.stage(destination)
    return [
        _signed(destination, suite, indexes, made, algorithms[suite.directory], key)
        for suite in suites
    ]


def keep_aside(destination: Destination, paths: Collection[str], *above: str) -> None:
    """
    Move staged indexes of the archive to ``UPSTREAM``, for the next run.

    Args:
        above: directories of suites; other indexes in ``UPSTREAM`` below these are removed.
    """
    for path in paths:
        destination.move(f"{STAGED}/{path}", f"{UPSTREAM}/{path}")
    kept = frozenset(f"{UPSTREAM}/{path}" for path in paths)
    for path in list(destination.others(kept, UPSTREAM)):
        if path.startswith(tuple(f"{UPSTREAM}/{each}" for each in above)):
            destination.delete(path)


def take_back(destination: Destination, paths: Iterable[str]) -> None:
    """Stage those of the indexes that are in ``UPSTREAM``."""
    for path in paths:
        destination.move(f"{UPSTREAM}/{path}", f"{STAGED}/{path}")


def _algorithms(suite: Suite) -> tuple[str, ...]:
    release = suite.release
    found = {name for path in release.files for name, _ in release.digests_of(path)}
    return tuple(name for name in _FIELDS if name == "sha256" or name in found)


# Indexes.


def _written(
    destination: Destination,
    index: Index,
    number: int,
    own: OwnNames,
    algorithms: Sequence[str],
) -> list[PackedIndex]:
    """Write the forms of one new index to ``incoming``, and return them."""
    base = base_of(index.path)
    named = index.suite.release.files
    endings = [each for each in READ if index.suite.within(base) + each in named]
    outputs: list[PackedIndex] = []
    with destination.reporting("hold a new index"), ExitStack() as stack:
        for ending in endings:
            is_kept = bool(ending) or endings == [""]
            name = f"reindex.{number}{ending}" if is_kept else None
            output = PackedIndex(destination, base, ending, name, algorithms)
            outputs.append(stack.enter_context(closing(output)))
        for text in _paragraphs(destination, index, own):
            for output in outputs:
                output.write(text)
        for output in outputs:
            output.finish(destination)
    return outputs


def _paragraphs(destination: Destination, index: Index, own: OwnNames) -> Iterator[bytes]:
    """Yield the paragraphs of an index that the filters select and whose files all exist."""
    for entry in selected_by(destination, index, index.stays or (ALL,)):
        if entry.is_whole and all(
            own.refusal(each, index.path) is None and destination.is_there(each)
            for each in entry.files
        ):
            yield entry.text.strip(b"\n") + b"\n\n"


# Release files.


class _Line(NamedTuple):
    algorithm: str
    digest: bytes
    size: int
    path: str


def _signed(
    destination: Destination,
    suite: Suite,
    indexes: Sequence[Index],
    made: Mapping[int, Sequence[PackedIndex]],
    algorithms: Sequence[str],
    key: GpgKey,
) -> Suite:
    """
    Return a suite with a new, signed release file that names the kept files; update the suite's indexes.
    """
    mine = [(number, each) for number, each in enumerate(indexes) if each.suite is suite]
    lines: list[_Line] = []
    for number, index in mine:
        for output in made.get(number, ()):
            path = suite.within(output.path)
            lines += [_Line(*each, output.size, path) for each in output.digests()]
        if not index.kind:
            path = suite.within(index.path)
            size = suite.release.files[path].size or 0
            lines += [_Line(*each, size, path) for each in suite.release.digests_of(path)]
    text = _release_text(suite, lines, algorithms)
    release = read_release(text, f"the new Release of {suite.shown_name}", ignores_dates=True)
    files = _signatures(destination, suite, text, key)
    new = suite._replace(release=release, files=files)
    for number, index in mine:
        outputs = made.get(number, ())
        paths = [each.path for each in outputs if each.name is not None] or [index.path]
        index.forms = [below(new, release.files[suite.within(path)]) for path in paths]
        index.fallbacks = ()
        index.suite = new
        index.size = max((each.size for each in outputs), default=0) if outputs else index.size
    return new


def _release_text(suite: Suite, lines: Sequence[_Line], algorithms: Sequence[str]) -> bytes:
    """Return the archive's release file with ``lines`` in place of its list of files."""
    kept: list[str] = []
    is_kept = False
    content = upstream_text(suite).decode("utf-8", "surrogateescape")
    for line in content.replace("\r\n", "\n").split("\n"):
        if not line.strip() or line.startswith("#"):
            continue
        if line[:1] not in (" ", "\t"):
            is_kept = line.partition(":")[0].strip().lower() not in _DROPPED
        if is_kept:
            kept.append(line.rstrip())
    for algorithm in algorithms:
        kept.append(f"{_FIELDS[algorithm]}:")
        kept += [
            f" {each.digest.hex()} {each.size:8} {each.path}"
            for each in sorted(lines, key=lambda line: line.path)
            if each.algorithm == algorithm
        ]
    return "\n".join([*kept, ""]).encode("utf-8", "surrogateescape")


def _signatures(
    destination: Destination, suite: Suite, text: bytes, key: GpgKey
) -> dict[str, bytes]:
    """Return the release file and its signatures; existing signatures are reused if they are valid."""
    inline = destination.read(suite.place("InRelease"), MAX_RELEASE_BYTES)
    detached = destination.read(suite.place("Release.gpg"), MAX_RELEASE_BYTES)
    if inline is None or not key.has_signed_inline(text, inline):
        inline = key.inline(text)
    if detached is None or not key.has_signed(text, detached):
        detached = key.detached(text)
    return {"Release": text, "Release.gpg": detached, "InRelease": inline}


def upstream_text(suite: Suite) -> bytes:
    """Return the content of the archive's release file without a signature."""
    return unsigned_part(suite.files.get("InRelease") or suite.files["Release"])


# The record of the release files that the indexes were rebuilt from.


def record_of(suites: Iterable[Suite]) -> dict[str, str]:
    """Return the hash of each suite's release file by the suite's directory."""
    return {suite.directory: sha256(upstream_text(suite)).hexdigest() for suite in suites}


def read_record(destination: Destination) -> dict[str, str]:
    """Return what earlier runs have recorded, in the form of ``record_of``; empty if there is no record."""
    data = destination.read(f"{HIDDEN}/{RECORD}", MAX_RECORD_BYTES) or b""
    lines = data.decode("utf-8", "replace").splitlines()
    return {path: digest for digest, _, path in (line.partition(" ") for line in lines)}


def write_record(destination: Destination, new: Mapping[str, str]) -> None:
    """
    Add the release files that the indexes were rebuilt from to the record.

    Raises:
        MirrorError: the record cannot be written.
    """
    known = read_record(destination)
    record = {**known, **new}
    if record != known:
        text = "".join(f"{digest} {path}\n" for path, digest in sorted(record.items()))
        destination.keep_own(RECORD, text.encode("utf-8"))
