"""
The suites of a Debian archive, by their release files: fetched from a mirror, believed if they are signed.

A suite whose name ends in a slash is flat: its release file and its indexes are in one directory, that of its
name, and no component is. What they name is below the archive all the same, as with any suite.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from io import BytesIO
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from pipegrid.mirror.deb822 import MAX_RELEASE_BYTES, Release, read_release
from pipegrid.mirror.signatures import MESSAGE, signed_parts, unescaped
from pipegrid.mirror.trust import MAX_SIGNATURE_BYTES, Keys, check_signature, signed_content
from pipegrid.mirror.wanted import (
    BadEntry,
    MirrorError,
    Skip,
    Wanted,
    check_path,
    place_of,
    quoted,
)

if TYPE_CHECKING:
    from pipegrid.mirror.destination import Destination
    from pipegrid.mirror.early import AnyMirror

MAX_AHEAD = timedelta(hours=1)
"""
How far an archive's clock may be ahead of ours. apt takes ten seconds, but what it refuses now it reads a
minute later. With a clock that is further behind nobody could tell what has expired.
"""


class Suite(NamedTuple):
    """
    One suite as one mirror has it, and as it was here: release files by name, and what they say.

    Attributes:
        directory: below the archive; "": the archive itself.
        is_flat: it has no components.
    """

    directory: str
    release: Release
    files: dict[str, bytes]
    before: Release | None
    is_flat: bool = False

    @property
    def shown_name(self) -> str:
        """How it is called in sentences."""
        return self.directory or "./"

    def place(self, path: str) -> str:
        """Return where in the archive a path is that its release file names."""
        return f"{self.directory}/{path}" if self.directory else path

    def within(self, path: str) -> str:
        """Return how its release file names a path of the archive."""
        return path.removeprefix(f"{self.directory}/") if self.directory else path


def canonical(suite: str) -> str:
    """
    Return the one name of a suite; a flat one may be called in several ways, as in apt's list of sources.

    Raises:
        BadEntry: it cannot be one.
    """
    if not suite.endswith("/"):
        check_path(suite)
        return suite
    parts = [part for part in suite.split("/") if part not in ("", ".")]
    if parts:
        check_path("/".join(parts))
    return "/".join((*(parts or "."), ""))


def _directory_of(suite: str) -> str:
    """Return where the release file of a suite is, by its one name."""
    if suite.endswith("/"):
        return suite.rstrip("/") if suite != "./" else ""
    return f"dists/{suite}"


OWN = ("Release", "Release.gpg", "InRelease")
"""Release files, in the order in which they are to be seen."""


_PACKAGE = re.compile(r".+\.(?:[udt]?deb|dsc|tar|tar\.[a-z0-9]+|diff\.gz|asc)")
"""What ends so can be a package or a part of a source; no index or release file does."""

_INDEX = re.compile(
    r"(?:.*/)?(?:(?:in)?release(?:\.gpg)?|(?:packages|sources)(?:\.(?:xz|gz|zst|bz2|diff/.*))?|by-hash/.*)"
)
"""What is called so outside of ``dists`` belongs to a flat suite, perhaps to one that another run keeps."""


def in_order(paths: Iterable[str]) -> list[str]:
    """Return paths that are to go in the order in which they may: what names packages before any of these."""
    return sorted(paths, key=lambda path: not _may_name_packages(place_of(path)))


def remove_in_order(destination: Destination, paths: Iterable[str]) -> None:
    """
    Remove files of an archive, each as ``Destination.delete`` does.

    Raises:
        MirrorError: one cannot be removed; those that were to go after it are still there.
    """
    for path in in_order(paths):
        destination.delete(path)


def _may_name_packages(place: str) -> bool:
    if place.partition("/")[0] in ("dists", "repodata"):
        return _PACKAGE.fullmatch(place) is None
    return _INDEX.fullmatch(place) is not None


class OwnNames:
    """
    The names of release files and indexes, which no package may have; but packages may stand beside them.

    Args:
        suites: that one run mirrors; others may be in the same archive.
        kept: what of them it keeps. The release file of a flat suite may name packages as well.
    """

    def __init__(self, suites: Iterable[Suite], kept: Iterable[Wanted]) -> None:
        self._named = {
            place_of(suite.place(path)) for suite in suites for path in suite.release.files
        }
        self._kept = {place_of(each.path): each for each in kept}

    def refusal(self, file: Wanted, index: str) -> BadEntry | None:
        """Return why a package may not be called as ``index`` names it; None: it may be."""
        path = file.path
        if path.startswith("pool/") and path.endswith(".deb"):  # most are
            return None
        place = place_of(path)
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
    """Whoever offers an older release than we have is behind, or hides something."""
    if before is None or before.date is None:
        return
    if release.date is None:
        if ignores_dates:
            return
        raise MirrorError(f"{name} has no date, and what is here has one")
    if release.date < before.date:
        raise MirrorError(
            f"{name} is of {release.date:%Y-%m-%d %H:%M:%S}, older than what is here, of"
            f" {before.date:%Y-%m-%d %H:%M:%S}"
        )


def _check_dates(release: Release, now: datetime, name: str) -> None:
    """Raise MirrorError for one that has expired, or is of the future."""
    until, date = release.valid_until, release.date
    if until is not None and until < now:
        raise MirrorError(
            f"{name} is stale: it was valid until {until.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
            " (--ignore-dates mirrors it nevertheless)"
        )
    if date is not None and date > now + MAX_AHEAD:
        raise MirrorError(
            f"{name} is of {date.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC, which is in the future; look"
            " at the clock of this machine (--ignore-dates mirrors it nevertheless)"
        )


def _says_the_same(plain: bytes, content: bytes) -> bool:
    """Return whether a text is the one that was signed, but for blanks at ends of lines."""
    if plain == content:
        return True
    lines = zip_longest(BytesIO(plain.strip()), BytesIO(content.strip()), fillvalue=b"")
    return all(one.rstrip() == other.rstrip() for one, other in lines)


def unsigned_part(data: bytes) -> bytes:
    """Return what a signed file says, without asking who says it."""
    if not data.startswith(MESSAGE):
        return data
    parts = signed_parts(data)
    if parts is not None:
        return unescaped(parts[0])
    content, _, _ = data.partition(b"\n\n")[2].partition(b"\n-----BEGIN PGP SIGNATURE-----")
    return unescaped(content) + b"\n"


class Suites:
    """
    Where suites are looked for.

    Args:
        now: for the dates of release files.
        ignores_dates: as of ``DebianArchive``.
    """

    def __init__(
        self,
        mirror: AnyMirror,
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
        Return a suite as the first mirror has it that can be believed.

        Args:
            skip: is called with the reason of each line of its release file that cannot be used.

        Raises:
            MirrorError: none can.
        """
        reasons: list[str] = []
        for number in range(self._mirror.count):
            found = await self._try(number, suite, reasons, skip)
            if found is not None:
                return found
        raise MirrorError(
            f"no mirror has a release file of {quoted(suite)} that can be trusted: {'; '.join(reasons)}"
        )

    async def _try(self, number: int, suite: str, reasons: list[str], skip: Skip) -> Suite | None:
        try:
            return await self._ask(number, suite, skip)
        except (MirrorError, BadEntry) as error:
            reasons.append(str(error))
            return None

    async def _ask(self, number: int, suite: str, skip: Skip) -> Suite:
        directory = _directory_of(suite)
        prefix = directory and f"{directory}/"
        answers = await self._mirror.small_files(number).fetch_all(
            (
                (f"{prefix}InRelease", MAX_RELEASE_BYTES),
                (f"{prefix}Release", MAX_RELEASE_BYTES),
                (f"{prefix}Release.gpg", MAX_SIGNATURE_BYTES),
            )
        )
        found = {path.rpartition("/")[2]: data for path, data in answers.items()}
        url = self._mirror.url(number)
        if not found.keys() & {"InRelease", "Release"}:
            why = "".join(f" ({each})" for each in list(answers.refused.values())[:1])
            raise MirrorError(f"{url} has no {prefix}InRelease and no Release{why}")
        content, files, name = await self._mirror.run(self._believe, found, prefix, url)
        skipped: list[BadEntry] = []
        release = read_release(content, name, skipped.append, self._ignores_dates)
        if not self._ignores_dates:
            _check_dates(release, self._now, name)
        before = await self._mirror.run(self._before, prefix)
        _check_not_older(before, release, name, self._ignores_dates)
        for reason in skipped:
            skip(reason)
        return Suite(directory, release, files, before, suite.endswith("/"))

    def _believe(
        self, found: dict[str, bytes], prefix: str, url: str
    ) -> tuple[bytes, dict[str, bytes], str]:
        """
        In the thread: return what is signed, the files that say so, and the name of the one that is read.

        A mirror may change between one request and the next: a file that does not say the same is left out.
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
        """In the thread: return what the release file says that is here."""
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
