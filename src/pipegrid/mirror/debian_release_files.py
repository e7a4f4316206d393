"""
The suites of a Debian archive: release files are found on a mirror and verified; and the names that are
reserved for release files and indexes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from functools import partial
from io import BytesIO
from itertools import zip_longest
from typing import NamedTuple

from pipegrid.mirror.archive_file import (
    ArchiveFile,
    BadEntry,
    MirrorError,
    Skip,
    casefold_path,
    check_path,
    quoted,
)
from pipegrid.mirror.debian_index_update import ArchiveMirror, first_trusted
from pipegrid.mirror.debian_metadata import MAX_RELEASE_BYTES, Release, read_release
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.signatures import (
    MAX_SIGNATURE_BYTES,
    MESSAGE,
    Keys,
    check_signature,
    signed_content,
    signed_parts,
    unescaped,
)

# The suites of a Debian archive: release files are fetched from a mirror, and trusted if they are signed.
#
# A suite whose name ends in a slash is flat: its release file and its indexes are in one directory that has
# the suite's name, and it has no components. The paths in its indexes are relative to the archive, as for any
# suite.

MAX_AHEAD = timedelta(hours=1)
"""
How far an archive's clock may be ahead of ours. apt accepts ten seconds; it can retry a minute later, but a
run of the mirror would fail. If our clock is much earlier than the archive's, expired files are not
recognised, so the limit is small.
"""


class Suite(NamedTuple):
    """
    One suite as one mirror has it: its release files by name, with their content.

    Attributes:
        directory: relative to the archive; "": the archive itself.
        release: the parsed release file.
        before: the existing release file in the destination, parsed; None if there is none.
        is_flat: the suite has no components.
    """

    directory: str
    release: Release
    files: dict[str, bytes]
    before: Release | None
    is_flat: bool = False

    @property
    def shown_name(self) -> str:
        return self.directory or "./"

    def place(self, path: str) -> str:
        """Return the path in the archive for a path in the suite's release file."""
        return f"{self.directory}/{path}" if self.directory else path

    def within(self, path: str) -> str:
        """Return the path in the suite's release file for a path in the archive."""
        return path.removeprefix(f"{self.directory}/") if self.directory else path


def canonical(suite: str) -> str:
    """
    Return the canonical name of a suite; a flat suite may have several names, as in apt's list of sources.

    Raises:
        BadEntry: the name is invalid.
    """
    if not suite.endswith("/"):
        check_path(suite)
        return suite
    parts = [part for part in suite.split("/") if part not in ("", ".")]
    if parts:
        check_path("/".join(parts))
    return "/".join((*(parts or "."), ""))


def _directory_of(suite: str) -> str:
    """Return the directory of a suite's release file, by the suite's canonical name."""
    if suite.endswith("/"):
        return suite.rstrip("/") if suite != "./" else ""
    return f"dists/{suite}"


OWN = ("Release", "Release.gpg", "InRelease")
"""The names of release files, in the order of their publication."""


_PACKAGE = re.compile(r".+\.(?:[udt]?deb|dsc|tar|tar\.[a-z0-9]+|diff\.gz|asc)")
"""Matches names that a package or a part of a source can have, but no index and no release file."""

_INDEX = re.compile(
    r"(?:.*/)?(?:(?:in)?release(?:\.gpg)?|(?:packages|sources)(?:\.(?:xz|gz|zst|bz2|diff/.*))?|by-hash/.*)"
)
"""Matches names that, outside of ``dists``, belong to a flat suite, perhaps to one that another run keeps."""


def in_order(paths: Iterable[str]) -> list[str]:
    """
    Return paths in the order in which their files must be removed: indexes and release files before packages.
    """
    return sorted(paths, key=lambda path: not _may_name_packages(casefold_path(path)))


def remove_in_order(destination: Destination, paths: Iterable[str]) -> None:
    """
    Remove files of an archive, indexes first, with ``Destination.delete``.

    Raises:
        MirrorError: a file cannot be removed; the files after it still exist.
    """
    for path in in_order(paths):
        destination.delete(path)


def _may_name_packages(place: str) -> bool:
    if place.partition("/")[0] in ("dists", "repodata"):
        return _PACKAGE.fullmatch(place) is None
    return _INDEX.fullmatch(place) is not None


class OwnNames:
    """
    The names of release files and indexes, which no package may have; packages may be in the same
    directories, however.

    Args:
        suites: the suites of one run; the archive may have others.
        kept: the indexes that the run keeps. The release file of a flat suite may name packages as well, so
            not all names in it are reserved.
    """

    def __init__(self, suites: Iterable[Suite], kept: Iterable[ArchiveFile]) -> None:
        self._named = {
            casefold_path(suite.place(path)) for suite in suites for path in suite.release.files
        }
        self._kept = {casefold_path(each.path): each for each in kept}

    def refusal(self, file: ArchiveFile, index: str) -> BadEntry | None:
        """Return why a package may not have the path that ``index`` gives; None if the path is allowed."""
        path = file.path
        if path.startswith("pool/") and path.endswith(".deb"):  # the usual case
            return None
        place = casefold_path(path)
        is_package = _PACKAGE.fullmatch(place) is not None
        if place.partition("/")[0] == "dists":
            wrong = place in self._named or not is_package
        elif is_package:
            other = self._kept.get(place, file)
            wrong = (other.path, other.digest) != (path, file.digest)
        else:
            wrong = place in self._named or _INDEX.fullmatch(place) is not None
        if not wrong:
            return None
        return BadEntry(
            f"{index} names the package {quoted(path)}, where only indexes and release files may be"
        )


def own_files(suite: Suite) -> dict[str, bytes]:
    return {suite.place(name): suite.files[name] for name in OWN if name in suite.files}


def _check_not_older(
    before: Release | None, release: Release, name: str, ignores_dates: bool
) -> None:
    """Refuse a release that is older than the existing one: the mirror is outdated, or hides an update."""
    if before is None or before.date is None:
        return
    if release.date is None:
        if ignores_dates:
            return
        raise MirrorError(f"{name} has no date, unlike the existing one")
    if release.date < before.date:
        raise MirrorError(
            f"{name} is of {release.date:%Y-%m-%d %H:%M:%S}, older than the existing one of"
            f" {before.date:%Y-%m-%d %H:%M:%S}"
        )


def _check_dates(release: Release, now: datetime, name: str) -> None:
    """Raise MirrorError for a release that has expired, or is from the future."""
    until, date = release.valid_until, release.date
    if until is not None and until < now:
        raise MirrorError(
            f"{name} is stale: it was valid until {until.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
            " (--ignore-dates mirrors it nevertheless)"
        )
    if date is not None and date > now + MAX_AHEAD:
        raise MirrorError(
            f"{name} is of {date.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC, which is in the future; "
            "check the clock of this machine (--ignore-dates mirrors it nevertheless)"
        )


def _says_the_same(plain: bytes, content: bytes) -> bool:
    """Return whether a text is the signed text, except for spaces at ends of lines."""
    if plain == content:
        return True
    lines = zip_longest(BytesIO(plain.strip()), BytesIO(content.strip()), fillvalue=b"")
    return all(one.rstrip() == other.rstrip() for one, other in lines)


def unsigned_part(data: bytes) -> bytes:
    """Return the text of a signed file, without its signature, which is not checked."""
    if not data.startswith(MESSAGE):
        return data
    parts = signed_parts(data)
    if parts is not None:
        return unescaped(parts[0])
    content, _, _ = data.partition(b"\n\n")[2].partition(b"\n-----BEGIN PGP SIGNATURE-----")
    return unescaped(content) + b"\n"


class Suites:
    """
    Finds suites on mirrors.

    Args:
        now: the time with which dates of release files are compared; None: the current time.
        ignores_dates: as for ``DebianArchive``.
    """

    def __init__(
        self,
        mirror: ArchiveMirror,
        keys: Keys,
        now: datetime | None = None,
        ignores_dates: bool = False,
    ) -> None:
        self._mirror = mirror
        self._destination = mirror.destination
        self._keys = keys
        self._now = now or datetime.now(timezone.utc)
        self._ignores_dates = ignores_dates

    async def find(self, suite: str, skip: Skip) -> Suite:
        """
        Return a suite from the first mirror with a trusted release file of it.

        Args:
            skip: called with the reason for each unusable line of the release file.

        Raises:
            MirrorError: no mirror has a trusted release file of the suite.
        """
        what = f"a release file of {quoted(suite)}"
        return await first_trusted(self._mirror, what, partial(self._ask, suite), skip)

    async def _ask(self, suite: str, number: int, url: str, skip: Skip) -> Suite:
        directory = _directory_of(suite)
        prefix = directory and f"{directory}/"
        answers = await self._mirror.fetch_small(
            number,
            (
                (f"{prefix}InRelease", MAX_RELEASE_BYTES),
                (f"{prefix}Release", MAX_RELEASE_BYTES),
                (f"{prefix}Release.gpg", MAX_SIGNATURE_BYTES),
            ),
        )
        found = {path.rpartition("/")[2]: data for path, data in answers.items()}
        if not found.keys() & {"InRelease", "Release"}:
            why = "".join(f" ({each})" for each in list(answers.refused.values())[:1])
            raise MirrorError(f"{url} has no {prefix}InRelease and no Release{why}")
        content, files, name = await self._mirror.run(self._believe, found, prefix, url)
        release = read_release(content, name, skip, self._ignores_dates)
        if not self._ignores_dates:
            _check_dates(release, self._now, name)
        before = await self._mirror.run(self._before, prefix)
        _check_not_older(before, release, name, self._ignores_dates)
        return Suite(directory, release, files, before, suite.endswith("/"))

    def _believe(
        self, found: dict[str, bytes], prefix: str, url: str
    ) -> tuple[bytes, dict[str, bytes], str]:
        """
        Check the signatures; return the signed text, the trusted files, and the name of the file with the
        text. Runs in the destination's thread.

        A mirror may change between two requests: ``Release`` is left out if its text differs from that of
        ``InRelease``.
        """
        keys = self._keys
        inline, plain = found.get("InRelease"), found.get("Release")
        name = f"{prefix}InRelease of {url}"
        content = None
        if inline is not None:
            content = (
                unsigned_part(inline)
                if keys.allow_unsigned
                else signed_content(inline, keys.keyrings, name, self._mirror.is_stopped)
            )
        if plain is not None and (content is None or _says_the_same(plain, content)):
            if content is None:
                name = f"{prefix}Release of {url}"
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
        assert content is not None
        return content, found, name

    def _check_plain(self, plain: bytes, signature: bytes | None, name: str) -> None:
        if self._keys.allow_unsigned:
            return
        if signature is None:
            raise MirrorError(f"{name} is not signed; nothing of it was used")
        check_signature(plain, signature, self._keys.keyrings, name, self._mirror.is_stopped)

    def _before(self, prefix: str) -> Release | None:
        """
        Return the content of the existing release file; None if there is none. Runs in the destination's
        thread.
        """
        for own in ("InRelease", "Release"):
            data = self._destination.read(prefix + own, MAX_RELEASE_BYTES)
            if data is not None:
                try:
                    return read_release(
                        unsigned_part(data), own, lambda _: None, ignores_dates=True
                    )
                except BadEntry:
                    continue
        return None
