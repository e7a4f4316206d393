"""A mirror of an RPM repository (rpm-md)."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipegrid.errors import UsageError
from pipegrid.mirror import HIDDEN
from pipegrid.mirror.archive_file import (
    ArchiveFile,
    BadEntry,
    MirrorError,
    Skip,
    casefold_path,
    holder,
    quoted,
)
from pipegrid.mirror.debian_filtered_indexes import read_record, take_back, write_record
from pipegrid.mirror.debian_index_update import ArchiveMirror, first_trusted, stage_indexes
from pipegrid.mirror.debian_release_files import remove_in_order
from pipegrid.mirror.decompression import check_index_bytes, index_blocks
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.file_scheduler import Report
from pipegrid.mirror.manifest import add_to_manifest, keep_manifest, noting
from pipegrid.mirror.package_filter import (
    ALL,
    Description,
    Matches,
    PackageFilter,
    Selector,
    SourceRpmsOf,
    others_of,
    read_records,
    select,
    write_first,
    write_records,
)
from pipegrid.mirror.rpm_filtered_indexes import chosen, is_left_out, is_rebuilt, rebuilt
from pipegrid.mirror.rpm_metadata import (
    MAX_REPOMD_BYTES,
    REPOMD,
    SIGNATURE,
    SOURCE_ARCHITECTURES,
    Package,
    Repomd,
    compare_versions,
    packages,
    read_repomd,
)
from pipegrid.mirror.signatures import MAX_SIGNATURE_BYTES, GpgKey, Keys, check_signature
from pipegrid.mirror.unique_entries import ArchiveOutcome

if TYPE_CHECKING:
    from pipegrid.mirror.mirror_lists import Metalink

# The signatures in the headers of packages, checked by rpm's own program.
#
# Correctly signed packages are recorded by hash, together with the hash of the keys, so that a package is
# checked only once. The code is synchronous, for the destination's thread.

CHECKED = "checked"
"""In ``HIDDEN``: the records of correctly signed packages."""

MAX_NOTES_BYTES = 64 << 20
MAX_KEY_BYTES = 4 << 20
AT_ONCE = 64
"""Maximum number of packages that one process of rpmkeys checks."""

TIMEOUT_S = 600.0


def check_packages(
    destination: Destination,
    packages: Iterable[ArchiveFile],
    keyrings: Sequence[str],
    stopped: Callable[[], bool],
) -> list[tuple[ArchiveFile, str]]:
    """
    Return the existing packages that none of the given keys has signed, each with the reason.

    Args:
        keyrings: files with public keys, in binary or text form.
        stopped: returns whether the run must end.

    Raises:
        MirrorError: rpmkeys does not exist, or accepts no key; or the run must end.
        UsageError: a file with keys cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="pipegrid-") as home:
        texts = [_text_of(each, home) for each in keyrings]
        known = b"".join(sorted(sha256(each).digest() for each in texts))
        head = sha256(known).hexdigest()
        notes = (destination.read(f"{HIDDEN}/{CHECKED}", MAX_NOTES_BYTES) or b"").decode(
            "ascii", "replace"
        )
        lines = notes.splitlines()
        right = set(lines[1:]) if lines[:1] == [head] else set()
        before = len(right)
        for number, text in enumerate(texts):
            path = Path(home, f"keys.{number}")
            path.write_bytes(text)
            _run(["rpmkeys", "--dbpath", f"{home}/db", "--import", str(path)], home)
        wrong: list[tuple[ArchiveFile, str]] = []
        missing = (each for each in packages if each.digest.hex() not in right)
        while chunk := list(islice(missing, AT_ONCE)):
            if stopped():
                raise MirrorError("stopped while signatures were checked; run the mirror again")
            for each, why in _found(destination, chunk, home):
                if why:
                    wrong.append((each, why))
                else:
                    right.add(each.digest.hex())
        if len(right) > before:
            destination.keep_own(CHECKED, "\n".join([head, *sorted(right)]).encode("ascii"))
    return wrong


def _text_of(keyring: str, home: str) -> bytes:
    """Return the keys of a file in text form, the only form that rpmkeys reads."""
    try:
        with open(keyring, "rb") as file:
            data = file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise UsageError(f"{keyring} cannot be read: {error.strerror}") from error
    if data.lstrip().startswith(b"-----BEGIN"):
        return data
    gpg = ["gpg", "--homedir", home, "--batch", "--no-options", "--no-default-keyring"]
    return _run([*gpg, "--keyring", os.path.abspath(keyring), "--armor", "--export"], home)


def _run(command: list[str], home: str, refuses: bool = True) -> bytes:
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "HOME": home}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (FileNotFoundError, NotADirectoryError):
        raise MirrorError(
            f"packages cannot be checked, since there is no {command[0]}; install it, or leave out --gpgcheck"
        ) from None
    except subprocess.TimeoutExpired:
        raise MirrorError(
            f"{command[0]} took more than {TIMEOUT_S:.0f} s; run the mirror again"
        ) from None
    if done.returncode and refuses:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise MirrorError(f"{command[0]} accepts no key: {' '.join(said)}; look at --keyring")
    return done.stdout


def _found(
    destination: Destination, packages: Sequence[ArchiveFile], home: str
) -> Iterator[tuple[ArchiveFile, str]]:
    """Yield each existing package, with the fault of its signature; "" if the signature is right."""
    places = {destination.where(each.path): each for each in packages}
    there = [place for place in places if os.path.isfile(place)]
    command = ["rpmkeys", "--dbpath", f"{home}/db", "--checksig", "--verbose", "--", *there]
    said = _run(command, home, refuses=False).decode("utf-8", "surrogateescape") if there else ""
    reasons = dict.fromkeys(there, "rpmkeys does not mention it")
    place = ""
    for line in said.splitlines():
        if line[:1] not in (" ", "\t") and line.removesuffix(":") in reasons:
            place = line.removesuffix(":")
            reasons[place] = "no signature is in it"
        elif place and "ignature" in line and reasons[place] in ("", "no signature is in it"):
            is_right = line.rstrip().endswith(": OK")
            reasons[place] = "" if is_right else f"rpmkeys says {line.strip()!r}"
        elif place and not line.rstrip().endswith(": OK"):
            reasons[place] = f"rpmkeys says {line.strip()!r}"
    for place in there:
        yield places[place], reasons[place]


MAX_NAMED = 5_000_000

_NUMBER = re.compile(r"[0-9]{1,15}")

MODULAR = ".module"
"""Part of the release of all packages of module streams, which are kept in all versions."""


class RpmOutcome(ArchiveOutcome):
    """
    The outcome of a run.

    Attributes:
        lacking_sources: how many wanted source packages the repository does not name.
    """

    lacking_sources = 0


class _Found(NamedTuple):
    """
    The repository as one mirror has it, with the content of its files by path; and the existing ``Repomd``.
    """

    repomd: Repomd
    files: dict[str, bytes]
    before: Repomd | None


class RpmRepository:
    """
    A mirror of one repository.

    The steps are those of a Debian archive (``debian_archive``), for the same reasons: 1. ``repomd.xml`` is
    fetched from the first mirror with a trusted one. 2. All files that it names are staged, where no client
    sees them. 3. The packages that ``primary`` names are fetched while it is being read, and published. 4.
    When all files exist the indexes are published, ``repomd.xml`` last. After that, if the caller wants it,
    files that no index names any more are removed, except the previous indexes, which clients may still read.

    Unusable entries of an index are skipped and counted; if mirrors lack a package, no index is published,
    unless the caller wants to keep going.

    Args:
        mirror: the mirrors and the destination; the URLs of the mirrors are the parents of ``repodata``.
        newest_only: keep only the highest version of packages with the same name and architecture, but all
            ``MODULAR`` ones; sets ``newest`` of ``wanted``.
        wanted: which packages of the index are wanted.
        metalink: names the acceptable ``repomd.xml``; None: any is acceptable.
        checks_packages: each package must be signed by one of the keys; see ``check_packages``.
        signing: the key that signs rebuilt indexes, which name only the fetched files and replace the
            repository's; see ``rpm_filtered_indexes``. None: the repository's indexes are published.
    """

    def __init__(
        self,
        mirror: ArchiveMirror,
        keys: Keys,
        newest_only: bool = False,
        wanted: PackageFilter = ALL,
        metalink: Metalink | None = None,
        checks_packages: bool = False,
        signing: GpgKey | None = None,
    ) -> None:
        if newest_only:
            wanted = wanted._replace(newest=1)
        self._mirror = mirror
        self._destination = mirror.destination
        self._keys = keys
        self._metalink = metalink
        self._wanted = wanted
        self._checks_packages = checks_packages
        self._signing = signing
        self._wrong: frozenset[str] = frozenset()
        self._lacking_sources = 0

    async def sync(
        self,
        delete: bool = False,
        dry_run: bool = False,
        keep_going: bool = False,
        delete_excluded: bool = False,
    ) -> RpmOutcome:
        """
        Bring the mirror up to date. Call this once.

        Args:
            delete: remove files that are not named any more, if nothing failed or was skipped, and every
                pattern of the filter matched.
            dry_run: fetch only indexes, publish nothing; ``mirror`` must be made for a dry run, too.
            keep_going: publish the indexes even if mirrors lack files that they name, or an index other than
                ``primary``.
            delete_excluded: with ``delete``, also remove files that only filters of earlier runs select.

        Raises:
            MirrorError: no mirror has a trusted ``repomd.xml``, an index could not be fetched, or the filters
                select no package.
            BadEntry: an index cannot be read.
        """
        outcome = RpmOutcome()
        entries = outcome.entries
        found = await first_trusted(self._mirror, f"a {REPOMD}", self._ask, entries.skip)
        if self._signing is not None:
            found = await self._mirror.run(self._take_back, found)
        indexes = await self._stage(found.repomd, outcome, keep_going)
        everything = [*await self._mirror.run(self._sized, indexes), *_own(found)]
        stays = await self._mirror.run(self._filters, delete_excluded)
        matches = Matches(self._wanted)
        named = self._contents(found.repomd, [self._wanted], entries.skip, matches)
        contents = entries.once(named)
        if not dry_run:
            contents = noting(self._destination, contents, () if self._signing else everything)
        report = outcome.report = await self._mirror.sync(contents)
        outcome.unmatched = matches.unmatched()
        outcome.lacking_sources = self._lacking_sources
        matches.check()
        if not dry_run and not (report.failed_files and report.is_stopped):
            await entries.settle(self._mirror, report)
            if self._checks_packages:
                await self._mirror.run(self._check_packages, found, report)
        if report.failed_files and (not keep_going or report.is_stopped):
            return outcome
        if dry_run:
            outcome.is_new = await self._mirror.run(self._would_be_new, found)
        else:
            found, everything = await self._show(found, everything, stays, outcome)
        if delete and not (report.failed_files or entries.skipped_files or outcome.unmatched):
            outcome.spares_others = len(stays) > 1
            outcome.removed = await self._mirror.run(
                self._remove, found, everything, stays, dry_run
            )
        return outcome

    async def _show(
        self,
        found: _Found,
        everything: list[ArchiveFile],
        stays: list[PackageFilter],
        outcome: RpmOutcome,
    ) -> tuple[_Found, list[ArchiveFile]]:
        """
        Rebuild indexes if that is wanted, and publish the indexes; return the repository as it was published,
        and its files.
        """
        record = _record_of(found)
        if self._signing is not None:
            found = await self._mirror.run(self._rebuild, found, everything, stays)
            everything = [*(each.file for each in found.repomd.files), *_own(found)]
            everything = await self._mirror.run(self._sized, everything)
            await self._mirror.run(add_to_manifest, self._destination, everything)
        records = {"": stays} if stays != [ALL] else {}
        await self._mirror.run(write_first, self._destination, records)
        outcome.is_new = not await self._mirror.run(self._destination.holds, found.files)
        indexes = [each for each in everything if each.path not in found.files]
        await self._mirror.run(self._publish, indexes, found)
        await self._mirror.run(keep_manifest, self._destination, outcome.entries.replaced)
        await self._mirror.run(write_records, self._destination, records)
        if self._signing is not None:
            await self._mirror.run(write_record, self._destination, record)
        outcome.is_published = True
        return found, everything

    def _would_be_new(self, found: _Found) -> bool:
        """
        Return whether ``repomd.xml`` differs from the existing one; if indexes are rebuilt, from the one that
        the existing indexes were rebuilt from. Runs in the destination's thread.
        """
        if self._signing is None:
            return not self._destination.holds(found.files)
        return not _record_of(found).items() <= read_record(self._destination).items()

    # Rebuilt indexes.

    def _take_back(self, found: _Found) -> _Found:
        """
        Stage those of the repository's indexes that are in ``UPSTREAM``; return the repository without
        indexes that would not match rebuilt ones. Runs in the destination's thread.
        """
        files = tuple(each for each in found.repomd.files if not is_left_out(each))
        take_back(self._destination, (each.file.path for each in files if is_rebuilt(each)))
        return found._replace(repomd=found.repomd._replace(files=files))

    def _rebuild(
        self, found: _Found, everything: Sequence[ArchiveFile], stays: Sequence[PackageFilter]
    ) -> _Found:
        """Stage new indexes that name only the existing packages. Runs in the destination's thread."""
        assert self._signing is not None
        there = {each.path for each in everything}
        files = tuple(each for each in found.repomd.files if each.file.path in there)
        repomd = found.repomd._replace(files=files)
        wanted = chosen(self._destination, self._packages(repomd, stays), self._wrong)
        new, own = rebuilt(self._destination, repomd, wanted, self._signing)
        return found._replace(repomd=new, files=own)

    async def _stage(
        self, repomd: Repomd, outcome: RpmOutcome, keep_going: bool
    ) -> list[ArchiveFile]:
        """Stage indexes, where no client sees them; return the indexes that could be fetched."""
        fetched = await stage_indexes(self._mirror, [each.file for each in repomd.files])
        outcome.index_bytes = fetched.size_bytes
        for path, why in fetched.lacking.items():
            reason = f"the index {path} could not be fetched ({why})"
            if not keep_going or path == repomd.primary.file.path:
                raise MirrorError(f"{reason}; the old ones stay")
            outcome.entries.skip(BadEntry(reason))
            outcome.lacking.append(path)
        return [each.file for each in repomd.files if each.file.path not in fetched.lacking]

    def _sized(self, indexes: list[ArchiveFile]) -> list[ArchiveFile]:
        """
        Return the indexes with their sizes, which ``repomd.xml`` may omit. Runs in the destination's thread.
        """
        return [
            each
            if each.size is not None
            else each.replaced(size=os.stat(self._destination.staged_path(each.path)).st_size)
            for each in indexes
        ]

    # ``repomd.xml``.

    async def _ask(self, number: int, url: str, skip: Skip) -> _Found:
        files = await self._mirror.fetch_small(
            number, ((REPOMD, MAX_REPOMD_BYTES), (SIGNATURE, MAX_SIGNATURE_BYTES))
        )
        if REPOMD not in files:
            raise MirrorError(
                f"{url} has no {REPOMD} ({files.refused.get(REPOMD, 'it does not exist')})"
            )
        return await self._mirror.run(self._believe, files, url, skip)

    def _believe(self, files: dict[str, bytes], url: str, skip: Skip) -> _Found:
        """
        Check the signature, the content and the age of a ``repomd.xml``. Runs in the destination's thread.
        """
        data = files[REPOMD]
        name = f"{REPOMD} of {url}"
        if self._metalink is not None and not self._metalink.names(data):
            raise MirrorError(f"{name} is none of those that the metalink names")
        if not self._keys.allow_unsigned:
            signature = files.get(SIGNATURE)
            if signature is None:
                raise MirrorError(
                    f"{name} is not signed; nothing of it was used (--allow-unsigned trusts the mirror)"
                )
            check_signature(data, signature, self._keys.keyrings, name, self._mirror.is_stopped)
        repomd = read_repomd(data, name, skip)
        for each in repomd.files:
            size = max(each.file.size or 0, (each.opened.size or 0) if each.opened else 0)
            check_index_bytes(each.file.path, size)
        before = self._before()
        _check_not_older(before, repomd, name)
        return _Found(repomd, files, before)

    def _before(self) -> Repomd | None:
        """
        Return the existing ``repomd.xml``; None if there is no usable one. Runs in the destination's thread.
        """
        data = self._destination.read(REPOMD, MAX_REPOMD_BYTES)
        try:
            return None if data is None else read_repomd(data, REPOMD, lambda _: None)
        except BadEntry:
            return None

    # The packages.

    def _check_packages(self, found: _Found, report: Report) -> None:
        """
        Report packages without a valid signature as failed, and remove those that no published index names.
        Runs in the destination's thread.
        """
        named = self._contents(found.repomd, [self._wanted])
        wrong = check_packages(
            self._destination, named, self._keys.keyrings, self._mirror.is_stopped
        )
        for each, why in wrong:
            report.fail(each.path, why)
        self._wrong = frozenset(each.path for each, _ in wrong)
        before: set[str] = set()
        if wrong and found.before is not None:
            with suppress(BadEntry, MirrorError, OSError):
                before.update(each.path for each in self._contents(found.before, [ALL]))
        for each, _ in wrong:
            if each.path not in before:  # no published index names the package
                self._destination.delete(each.path)

    def _filters(self, delete_excluded: bool) -> list[PackageFilter]:
        """
        Return the filters that keep packages: those of this run and of earlier runs. Runs in the
        destination's thread.
        """
        recorded = read_records(self._destination).get("", [])
        if not recorded and self._before() is not None:
            recorded = [ALL]
        others = [] if delete_excluded else others_of(recorded, self._wanted)
        return [self._wanted, *others]

    def _contents(
        self,
        repomd: Repomd,
        filters: Sequence[PackageFilter],
        skip: Skip | None = None,
        matches: Matches | None = None,
    ) -> Iterator[ArchiveFile]:
        """Yield the files of the wanted packages, which are fetched while the index is being read."""
        yield from (each.file for each in self._packages(repomd, filters, skip, matches))

    def _packages(
        self,
        repomd: Repomd,
        filters: Sequence[PackageFilter],
        skip: Skip | None = None,
        matches: Matches | None = None,
    ) -> Iterator[Package]:
        selectors: list[Selector] = [*filters]
        if ALL not in filters and any(each.sources for each in filters):
            selectors.append(self._sources_of([each for each in filters if each.sources], repomd))
        found = self._named(repomd, skip or (lambda _: None))
        if ALL in filters:
            yield from found
            return
        entries: Iterator[tuple[Description, Package]] = map(described, found)
        if matches is not None:
            entries = matches.noting(entries)
        for _, each in select(entries, selectors, compare_versions):
            if matches is not None:
                matches.selected += 1
            yield each

    def _sources_of(self, filters: Sequence[PackageFilter], repomd: Repomd) -> SourceRpmsOf:
        """Return a filter for the source packages of the packages that the filters select."""
        there: set[str] = set()

        def described_all() -> Iterator[tuple[Description, Package]]:
            for each in self._named(repomd, lambda _: None):
                if each.arch in SOURCE_ARCHITECTURES:
                    there.add(each.source)
                yield described(each)

        selected = select(described_all(), filters, compare_versions)
        names = frozenset(each.source for _, each in selected if each.source)
        if self._wanted in filters:
            self._lacking_sources = len(names - there)
        return SourceRpmsOf(names, SOURCE_ARCHITECTURES)

    def _named(self, repomd: Repomd, skip: Skip) -> Iterator[Package]:
        primary = repomd.primary
        path = primary.file.path
        places = {casefold_path(each.file.path) for each in repomd.files}
        # Paths in the directory of the indexes need no check here: no package may have such a path.
        places = {each for each in places if not each.startswith("repodata/")}
        size = None if primary.opened is None else primary.opened.size
        blocks = index_blocks(self._destination.staged_path(path), path, size)
        for count, each in enumerate(packages(blocks, path, self._mirror.urls, skip)):
            if count >= MAX_NAMED:
                raise BadEntry(f"{path} names more than {MAX_NAMED} packages; no repository does")
            if places and casefold_path(each.file.path) in places:
                skip(
                    BadEntry(
                        f"{path} names the package {quoted(each.file.path)}, which is an index itself"
                    )
                )
                continue
            yield each

    # Publication.

    def _publish(self, indexes: list[ArchiveFile], found: _Found) -> None:
        """
        Publish the indexes, and last ``repomd.xml`` with its signature. Runs in the destination's thread.
        """
        destination = self._destination
        destination.stage(found.files)
        destination.release([each.path for each in indexes])
        # A client that reads between these two renames finds a signature that does not match, and reads both
        # again.
        destination.release([path for path in (SIGNATURE, REPOMD) if path in found.files])
        if SIGNATURE not in found.files:
            destination.delete(SIGNATURE)
        destination.clear_staged()

    def _remove(
        self,
        found: _Found,
        everything: list[ArchiveFile],
        stays: Sequence[PackageFilter],
        dry_run: bool,
    ) -> list[str]:
        """
        Remove files that neither the current nor the previous indexes name. Runs in the destination's thread.
        """
        destination = self._destination
        kept = {each.path for each in chain(self._contents(found.repomd, stays), everything)}
        before = found.before
        if before is not None:
            kept.update(each.file.path for each in before.files)
        others = list(destination.others(frozenset(kept)))
        if others and before is not None and before.primary.file != found.repomd.primary.file:
            # A previous index that cannot be read is not needed: clients cannot read it, either.
            with suppress(BadEntry, MirrorError, OSError):
                if destination.is_there(before.primary.file):
                    named = (each.path for each in self._contents(before, stays))
                    is_named = holder(named, destination.folds)
                    others = [path for path in others if not is_named(path)]
        if not dry_run:
            remove_in_order(destination, others)
        return others


def described(package: Package) -> tuple[Description, Package]:
    """Return a package, preceded by its description for filters."""
    is_modular = MODULAR in package.version.release
    about = Description(
        package.name,
        package.arch,
        package.version,
        source=(package.source, ""),
        is_modular=is_modular,
    )
    return about, package


def _record_of(found: _Found) -> dict[str, str]:
    return {"repodata": sha256(found.files[REPOMD]).hexdigest()}


def _own(found: _Found) -> list[ArchiveFile]:
    return [
        ArchiveFile(path, len(data), "sha256", sha256(data).digest())
        for path, data in found.files.items()
    ]


def _check_not_older(before: Repomd | None, repomd: Repomd, name: str) -> None:
    """
    Refuse a ``repomd.xml`` that is older than the existing one: the mirror is outdated, or hides an update.

    The revisions are compared if both are numbers, as createrepo writes them; otherwise the timestamps of the
    files.
    """
    if before is None:
        return
    new, old = repomd.timestamp, before.timestamp
    if _NUMBER.fullmatch(repomd.revision) and _NUMBER.fullmatch(before.revision):
        new, old = int(repomd.revision), int(before.revision)
    if new < old:
        raise MirrorError(
            f"{name} is of {new}, older than the existing one of {old}; give a mirror that is up to date"
        )
