"""
A Debian archive: release file, indexes, packages; so that whoever reads it meanwhile never finds a name
without its file.

1. Release files are fetched from the first mirror that has one that is signed; that mirror has said what
is to be had. 2. Indexes that it names are brought to where nobody sees them (``indexes``), each proven by
its hash. 3. What they name is fetched, while they are still being read, and gets its names. 4. When all is
there the indexes get theirs, the release files last; then what is not named any more may go.

If anything is missing at the end of 3 the old indexes stay: they name what is there. Between the first
name and the last of 4 the old release file stands beside new indexes; where the archive has indexes by
hash, readers find the old ones so, as long as nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Literal

import attrs
from twisted.internet.defer import Deferred, FirstError, gatherResults

from pipegrid.errors import UsageError
from pipegrid.mirror import compressed
from pipegrid.mirror.deb822 import (
    MAX_RELEASE_BYTES,
    Release,
    packages,
    read_patch_index,
    read_release,
    sources,
)
from pipegrid.mirror.destination import STAGED, Destination
from pipegrid.mirror.indexes import Unpacked, by_hash, kept_as, obtain, update
from pipegrid.mirror.mirror import Mirror
from pipegrid.mirror.patching import unpacked
from pipegrid.mirror.pdiff import PatchError
from pipegrid.mirror.report import Report
from pipegrid.mirror.trust import Keys, check_signature, signed_content
from pipegrid.mirror.wanted import BadEntry, MirrorError, Wanted, check_path, shown

MAX_SIGNATURE_BYTES = 1 << 20
MAX_INDEX_BYTES = 4 << 30
"""Unpacked, of one index whose size the release file does not tell."""

MAX_NAMED = 5_000_000
"""Files; the largest archive names 1.4 million."""

HELD = (".xz", ".gz")
"""The forms in which an index is kept, where the archive has them; the first is the one that is read."""

READ = (*HELD, ".zst", ".bz2", "")

Kept = Literal["packed", "unpacked", "zstd"]


@attrs.frozen
class Selection:
    """
    What of an archive is wanted.

    Attributes:
        suites: such as ``sid`` or ``bookworm/updates``.
        components: such as ``main``; empty: all that the release names.
        architectures: of binary packages, such as ``amd64``.
        with_sources: sources, too.
        with_patches: also the patches of the indexes, for readers.
        also: patterns of further files that the release file names, such as ``main/i18n/Translation-en.*``.
        indexes: in which form indexes are kept: as the archive packs them; or unpacked, or compressed
            here, which patches bring up to date.
    """

    suites: tuple[str, ...]
    components: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ("amd64",)
    with_sources: bool = False
    with_patches: bool = False
    also: tuple[str, ...] = ()
    indexes: Kept = "packed"


@attrs.define
class Outcome:
    """
    What has become of a run.

    Attributes:
        report: of the packages.
        removed: paths that were deleted, or would be.
        index_bytes: fetched for indexes and their patches.
        patched: indexes that patches brought up to date.
        lacking: files of ``also``, or further forms of indexes, that no mirror has.
    """

    report: Report
    removed: list[str] = attrs.Factory(list)
    index_bytes: int = 0
    patched: int = 0
    lacking: list[str] = attrs.Factory(list)


@attrs.frozen
class _Suite:
    """One suite as one mirror has it, and as it was here: release files by name, and what they say."""

    directory: str
    release: Release
    files: dict[str, bytes]
    before: Release | None


@attrs.define(eq=False)
class _Index:
    """
    An index to be kept.

    Attributes:
        kind: how it is read; "": it is not.
        forms: as they are kept; the first is the one that is read, and must be had.
        size: unpacked, in bytes; None: not known.
    """

    suite: _Suite
    kind: Literal["packages", "sources", "patches", ""]
    forms: list[Wanted]
    size: int | None = None

    @property
    def path(self) -> str:
        return self.forms[0].path


class DebianArchive:
    """
    Args:
        mirror: where it is fetched from and kept.
        now: for the dates of release files.

    Raises:
        UsageError: a suite, component or architecture cannot be one.
    """

    def __init__(
        self, mirror: Mirror, selection: Selection, keys: Keys, now: datetime | None = None
    ) -> None:
        if not selection.suites:
            raise UsageError("give a suite, such as sid")
        for name in (*selection.suites, *selection.components, *selection.architectures):
            _check_name(name)
        self._mirror = mirror
        self._destination = mirror.destination
        self._selection = selection
        self._keys = keys
        self._now = now or datetime.now(timezone.utc)

    def sync(self, delete: bool = False, dry_run: bool = False) -> Deferred[Outcome]:
        """
        Bring it up to date. To be called once.

        Args:
            delete: remove what is not named any more, if nothing failed.
            dry_run: fetch indexes only, publish nothing; as the mirror was told.

        Raises (through the Deferred):
            MirrorError: no mirror has a release file that can be believed, or an index could not be had.
            BadEntry: an index names what may not be.
        """
        return Deferred.fromCoroutine(self._sync(delete, dry_run))

    async def _sync(self, delete: bool, dry_run: bool) -> Outcome:
        suites = [await self._find(suite) for suite in self._selection.suites]
        indexes = [each for suite in suites for each in self._indexes(suite)]
        outcome = Outcome(Report())
        await self._stage(indexes, outcome)
        report = outcome.report = await self._mirror.sync(self._contents(indexes))
        if report.failed_files:
            return outcome
        own = {path: data for suite in suites for path, data in _own_files(suite).items()}
        if not dry_run:
            await self._mirror.run(self._publish, suites, indexes, own)
            await self._mirror.complete(self._everything(indexes, own))
        if delete:
            kept = {each.path for each in self._everything(indexes, own)}
            for suite in suites:
                kept.update(_other_names(suite, indexes))
            outcome.removed = await self._mirror.delete_others(kept, dry_run)
        return outcome

    # Release files.

    async def _find(self, suite: str) -> _Suite:
        reasons: list[str] = []
        for number in range(self._mirror.count):
            found = await self._try(number, suite, reasons)
            if found is not None:
                return found
        raise MirrorError(
            f"no mirror has a release file of {shown(suite)} to be believed: {'; '.join(reasons)}"
        )

    async def _try(self, number: int, suite: str, reasons: list[str]) -> _Suite | None:
        try:
            return await self._ask(number, suite)
        except (MirrorError, BadEntry) as error:
            reasons.append(str(error))
            return None

    async def _ask(self, number: int, suite: str) -> _Suite:
        directory = f"dists/{suite}"
        small = self._mirror.small_files(number)
        asked = (
            ("InRelease", MAX_RELEASE_BYTES),
            ("Release", MAX_RELEASE_BYTES),
            ("Release.gpg", MAX_SIGNATURE_BYTES),
        )
        try:
            answers = await gatherResults(
                [
                    Deferred.fromCoroutine(small.fetch(f"{directory}/{name}", most))
                    for name, most in asked
                ],
                consumeErrors=True,
            )
        except FirstError as error:
            error.subFailure.raiseException()
        finally:
            await small.close()
        found = {
            name: data for (name, _), data in zip(asked, answers, strict=True) if data is not None
        }
        url = self._mirror.url(number)
        content, files, name = await self._mirror.run(self._believe, found, directory, url)
        release = read_release(content, name)
        if release.valid_until is not None and release.valid_until < self._now:
            raise MirrorError(
                f"{name} is stale: it was valid until {release.valid_until:%Y-%m-%d %H:%M} UTC"
            )
        before = await self._mirror.run(self._before, directory)
        _check_not_older(before, release, name)
        return _Suite(directory, release, files, before)

    def _believe(
        self, found: dict[str, bytes], directory: str, url: str
    ) -> tuple[bytes, dict[str, bytes], str]:
        """
        In the thread: return what is signed, the files that say so, and the name of the one that is read.

        A mirror may change between one request and the next: a file that does not say the same is left out.
        """
        keys = self._keys
        inline, plain = found.get("InRelease"), found.get("Release")
        name = f"{directory}/InRelease of {url}"
        content = None
        if inline is not None:
            content = (
                unsigned_part(inline)
                if keys.allow_unsigned
                else signed_content(inline, keys.keyrings, name)
            )
        if plain is not None and (content is None or _says_the_same(plain, content)):
            if content is None:
                name = f"{directory}/Release of {url}"
            try:
                self._check_plain(plain, found.get("Release.gpg"), name)
            except MirrorError:
                if content is None:
                    raise
                del found["Release"]
        elif plain is not None:
            del found["Release"]
        if "Release" not in found:
            found.pop("Release.gpg", None)
        if content is None:
            content = plain
        if content is None:
            raise MirrorError(f"{url} has no {directory}/InRelease and no Release")
        return content, found, name

    def _check_plain(self, plain: bytes, signature: bytes | None, name: str) -> None:
        if self._keys.allow_unsigned:
            return
        if signature is None:
            raise MirrorError(f"{name} is not signed; nothing of it was used")
        check_signature(plain, signature, self._keys.keyrings, name)

    def _before(self, directory: str) -> Release | None:
        """In the thread: return what the release file says that is here."""
        for own in ("InRelease", "Release"):
            data = self._destination.read(f"{directory}/{own}", MAX_RELEASE_BYTES)
            if data is not None:
                try:
                    return read_release(unsigned_part(data), own)
                except BadEntry:
                    continue
        return None

    # Indexes.

    def _indexes(self, suite: _Suite) -> Iterator[_Index]:
        """Yield the indexes to be kept, each once."""
        selection, release = self._selection, suite.release
        seen: set[str] = set()
        kinds: list[tuple[Literal["packages", "sources"], str]] = [
            ("packages", f"binary-{name}/Packages") for name in selection.architectures
        ]
        if selection.with_sources:
            kinds.append(("sources", "source/Sources"))
        for component in selection.components or release.components:
            for kind, name in kinds:
                index = self._index(suite, kind, f"{component}/{name}")
                if index.path in seen:
                    continue
                seen.update(each.path for each in index.forms)
                yield index
                patches = f"{component}/{name}.diff/Index"
                if selection.with_patches and patches in release.files:
                    each = _below(suite, release.files[patches])
                    seen.add(each.path)
                    yield _Index(suite, "patches", [each], MAX_RELEASE_BYTES)
        for path, file in release.files.items():
            each = _below(suite, file)
            if each.path not in seen and self._is_wanted_also(path, release):
                yield _Index(suite, "", [each])

    def _is_wanted_also(self, path: str, release: Release) -> bool:
        # Archives name what packed forms hold as well, and do not have it.
        if any(path + ending in release.files for ending in READ if ending):
            return False
        return any(fnmatchcase(path, pattern) for pattern in self._selection.also)

    def _index(self, suite: _Suite, kind: Literal["packages", "sources"], base: str) -> _Index:
        named = suite.release.files
        endings = [ending for ending in READ if base + ending in named]
        if not endings:
            raise MirrorError(
                f"the release file of {suite.directory} names no {base}; it has the components"
                f" {' '.join(suite.release.components)} and the architectures"
                f" {' '.join(suite.release.architectures)}"
            )
        if self._selection.indexes != "packed":
            if base not in named:
                raise MirrorError(
                    f"the release file of {suite.directory} does not tell the hash of {base} unpacked,"
                    " so that nobody could use it; keep indexes packed"
                )
            held = [""]
        else:
            held = [ending for ending in endings if ending in HELD] or endings[:1]
        size = named[base].size if base in named else None
        forms = [_below(suite, named[base + each]) for each in held]
        largest = max(size or 0, *(form.size or 0 for form in forms))
        if largest > MAX_INDEX_BYTES:
            raise BadEntry(f"{base} is said to have {largest} bytes, which no index has")
        return _Index(suite, kind, forms, size)

    async def _stage(self, indexes: Sequence[_Index], outcome: Outcome) -> None:
        """Bring indexes to where they can be read, and nobody sees them."""
        ours = self._selection.indexes != "packed"
        made = [i for i in indexes if ours and i.kind in ("packages", "sources")]
        if made:
            wants = [await self._mirror.run(self._unpacked, index) for index in made]
            done = await update(self._mirror, wants, patches_are_kept=self._selection.with_patches)
            outcome.index_bytes += done.fetched_bytes
            outcome.patched += done.patched
            await self._mirror.run(self._note_forms, made, wants)
        plain = [index for index in indexes if index not in made]
        fetched = await obtain(self._mirror, [form for index in plain for form in index.forms])
        outcome.index_bytes += fetched.size_bytes
        for index in plain:
            for form in list(index.forms):
                why = fetched.lacking.get(form.path)
                if why is None:
                    continue
                if form is index.forms[0] and index.kind:
                    raise MirrorError(
                        f"the index {form.path} could not be fetched ({why}); the old one stays"
                    )
                outcome.lacking.append(form.path)
                index.forms.remove(form)

    def _note_forms(self, made: Sequence[_Index], wants: Sequence[Unpacked]) -> None:
        """In the thread: keep them as the files that they are."""
        for index, want in zip(made, wants, strict=True):
            kept = kept_as(self._mirror, want)
            assert kept is not None
            index.forms = [kept]

    def _unpacked(self, index: _Index) -> Unpacked:
        """In the thread: look what there is to make an index of."""
        suite, target = index.suite, index.forms[0]
        base = target.path.removeprefix(f"{suite.directory}/")
        named = suite.release.files
        patches = named.get(f"{base}.diff/Index")
        have = None
        known = suite.before.files if suite.before is not None else {}
        if base in known:
            # The release file that is here says what is in the index that is here, however that is packed.
            for ending in ("", *HELD):
                form = known.get(base + ending)
                if form is not None and self._destination.is_there(_below(suite, form)):
                    have = (f"{target.path}{ending}", known[base])
                    break
            kept = compressed.find(self._destination, _below(suite, known[base]), staged=False)
            if have is None and kept is not None:
                have = (kept.path, known[base])
        return Unpacked(
            target,
            tuple(_below(suite, named[base + ending]) for ending in READ if base + ending in named),
            None if patches is None else _below(suite, patches),
            have,
            self._selection.indexes == "zstd",
        )

    # What they name.

    def _contents(self, indexes: Sequence[_Index]) -> Iterator[Wanted]:
        """Yield what the indexes name; a file may be named several times."""
        count = 0
        for index in indexes:
            for each in self._named_by(index):
                count += 1
                if count > MAX_NAMED:
                    raise BadEntry(f"the indexes name more than {MAX_NAMED} files; no archive does")
                yield each

    def _named_by(self, index: _Index) -> Iterator[Wanted]:
        if not index.kind:
            return
        blocks = _bounded(self._destination.staged_path(index.path), index)
        if index.kind == "patches":
            directory = index.path.rpartition("/")[0]
            found = read_patch_index(b"".join(map(bytes, blocks)), directory, index.path)
            yield from (step.packed for step in found.steps if step.packed is not None)
        else:
            read = packages if index.kind == "packages" else sources
            yield from read(blocks, index.path)

    def _everything(self, indexes: Sequence[_Index], own: dict[str, bytes]) -> Iterator[Wanted]:
        """Yield all that is kept, each once."""
        seen: set[str] = set()
        for each in self._contents(indexes):
            if each.path not in seen:
                seen.add(each.path)
                yield each
        for index in indexes:
            yield from index.forms
        for path, data in own.items():
            yield Wanted(path, len(data), "sha256", sha256(data).digest())

    # Publication.

    def _publish(
        self, suites: Sequence[_Suite], indexes: Sequence[_Index], own: dict[str, bytes]
    ) -> None:
        """In the thread: names by hash, indexes, release files; and nothing stays that is of before."""
        destination = self._destination
        destination.stage(own)
        forms = [form for index in indexes for form in index.forms]
        for form in forms:
            if form.remote is not None:
                destination.link(form.path, form.remote)
        destination.release([*(form.path for form in forms), *own])
        # A form that is not kept any more would stand beside a release file that says something else of it.
        kept = {form.path for form in forms} | own.keys()
        for suite in suites:
            before = [_below(suite, form).path for form in _main_forms(suite.before)]
            for path in (
                *before,
                *(path + compressed.ENDING for path in before),
                *(f"{suite.directory}/{name}" for name in OWN),
            ):
                if path not in kept:
                    destination.delete(path)
        destination.clear_staged()


def _check_name(name: str) -> None:
    try:
        check_path(name)
    except BadEntry:
        raise UsageError(
            f"{shown(name)} is no suite, component or architecture that can be mirrored; flat archives"
            " can not, either"
        ) from None


OWN = ("Release", "Release.gpg", "InRelease")
"""Release files, in the order in which they are to be seen."""


def _own_files(suite: _Suite) -> dict[str, bytes]:
    return {f"{suite.directory}/{name}": suite.files[name] for name in OWN if name in suite.files}


def _main_forms(release: Release | None) -> Iterator[Wanted]:
    """Yield the packed and unpacked forms of what packages and sources were named by."""
    for path, form in release.files.items() if release is not None else ():
        name = path.rpartition("/")[2].partition(".")[0]
        if name in ("Packages", "Sources") and ".diff/" not in path:
            yield form


def _other_names(suite: _Suite, indexes: Sequence[_Index]) -> Iterator[str]:
    """Yield the names by hash, of now and of before: who has read the old release file still looks there."""
    for index in indexes:
        for form in index.forms:
            if form.remote is not None:
                yield form.remote
    if suite.before is not None and suite.before.by_hash:
        kept = {form.path for index in indexes for form in index.forms}
        for form in suite.before.files.values():
            old = by_hash(f"{suite.directory}/{form.path}", form)
            if old is not None and f"{suite.directory}/{form.path}" in kept:
                yield old


def _below(suite: _Suite, file: Wanted) -> Wanted:
    path = f"{suite.directory}/{file.path}"
    remote = by_hash(path, file) if suite.release.by_hash else None
    return file._replace(path=path, remote=remote)


def names_by_hash(destination: Destination, entries: Sequence[Wanted]) -> Iterator[tuple[str, str]]:
    """
    Yield each index's path, and its name by hash, of suites that have such names; see ``Destination.link``.

    Args:
        entries: what an archive holds, all of it there, or staged.
    """
    for own in entries:
        directory, _, name = own.path.rpartition("/")
        if name not in ("InRelease", "Release") or not own.path.startswith("dists/"):
            continue
        data = destination.read(f"{STAGED}/{own.path}", MAX_RELEASE_BYTES)
        if data is None:
            data = destination.read(own.path, MAX_RELEASE_BYTES)
        release = read_release(unsigned_part(data or b""), own.path)
        for each in entries if release.by_hash else ():
            named = release.files.get(each.path.removeprefix(f"{directory}/"))
            other = by_hash(each.path, each)
            if other is not None and named is not None and named.digest == each.digest:
                yield each.path, other


def _check_not_older(before: Release | None, release: Release, name: str) -> None:
    """Whoever offers an older release than we have is behind, or hides something."""
    if before is None or before.date is None:
        return
    if release.date is None:
        raise MirrorError(f"{name} has no date, and what is here has one")
    if release.date < before.date:
        raise MirrorError(
            f"{name} is of {release.date:%Y-%m-%d %H:%M:%S}, older than what is here, of"
            f" {before.date:%Y-%m-%d %H:%M:%S}"
        )


def _bounded(path: str, index: _Index) -> Iterator[bytes]:
    """Yield what is in an index, and no more than it should have."""
    most = MAX_INDEX_BYTES if index.size is None else index.size
    size = 0
    try:
        for block in unpacked(path):
            size += len(block)
            if size > most:
                raise BadEntry(f"{index.path} has more than {most} bytes, unpacked; it is not used")
            yield block
    except PatchError as error:
        raise BadEntry(f"the index {index.path} cannot be read: {error}") from error


def _says_the_same(plain: bytes, content: bytes) -> bool:
    """Return whether a text is the one that was signed, but for blanks at ends of lines."""
    return [line.rstrip() for line in plain.strip().split(b"\n")] == [
        line.rstrip() for line in content.strip().split(b"\n")
    ]


def unsigned_part(data: bytes) -> bytes:
    """Return what a signed file says, without asking who says it."""
    if not data.startswith(b"-----BEGIN PGP SIGNED MESSAGE-----"):
        return data
    _, _, rest = data.partition(b"\n\n")
    content, _, _ = rest.partition(b"\n-----BEGIN PGP SIGNATURE-----")
    return b"\n".join(line.removeprefix(b"- ") for line in content.split(b"\n")) + b"\n"
