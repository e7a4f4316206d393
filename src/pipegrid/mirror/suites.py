"""
The suites of a Debian archive, by their release files: fetched from a mirror, believed if they are signed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

from pipegrid.mirror.deb822 import MAX_RELEASE_BYTES, Release, read_release
from pipegrid.mirror.trust import Keys, check_signature, signed_content
from pipegrid.mirror.wanted import BadEntry, MirrorError, place_of, shown

if TYPE_CHECKING:
    from pipegrid.mirror.early import AnyMirror

MAX_SIGNATURE_BYTES = 1 << 20


class Suite(NamedTuple):
    """One suite as one mirror has it, and as it was here: release files by name, and what they say."""

    directory: str
    release: Release
    files: dict[str, bytes]
    before: Release | None


OWN = ("Release", "Release.gpg", "InRelease")
"""Release files, in the order in which they are to be seen."""


_PACKAGE = re.compile(r".+\.(?:[udt]?deb|dsc|tar|tar\.[a-z0-9]+|diff\.gz|asc)")
"""What ends so can be a package or a part of a source; no index or release file does."""


class OwnNames:
    """
    The names of release files and indexes, which no package may have; but packages may stand beside them.

    Args:
        suites: that one run mirrors; others may be in the same archive.
    """

    def __init__(self, suites: Iterable[Suite]) -> None:
        self._named = {
            place_of(f"{suite.directory}/{path}")
            for suite in suites
            for path in suite.release.files
        }

    def check(self, path: str, index: str) -> None:
        """
        Raises:
            BadEntry: ``index`` names a package that is called so.
        """
        if path.startswith("pool/") or place_of(path.partition("/")[0]) != "dists":
            return
        place = place_of(path)
        if place in self._named or _PACKAGE.fullmatch(place) is None:
            raise BadEntry(
                f"{index} names the package {shown(path)}, where only indexes and release files may be"
            )


def own_files(suite: Suite) -> dict[str, bytes]:
    return {f"{suite.directory}/{name}": suite.files[name] for name in OWN if name in suite.files}


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


class Suites:
    """
    Where suites are looked for.

    Args:
        now: for the dates of release files.
    """

    def __init__(self, mirror: AnyMirror, keys: Keys, now: datetime | None) -> None:
        self._mirror = mirror
        self._destination = mirror.destination
        self._keys = keys
        self._now = now or datetime.now(timezone.utc)

    async def find(self, suite: str) -> Suite:
        """
        Return a suite as the first mirror has it that can be believed.

        Raises:
            MirrorError: none can.
        """
        reasons: list[str] = []
        for number in range(self._mirror.count):
            found = await self._try(number, suite, reasons)
            if found is not None:
                return found
        raise MirrorError(
            f"no mirror has a release file of {shown(suite)} to be believed: {'; '.join(reasons)}"
        )

    async def _try(self, number: int, suite: str, reasons: list[str]) -> Suite | None:
        try:
            return await self._ask(number, suite)
        except (MirrorError, BadEntry) as error:
            reasons.append(str(error))
            return None

    async def _ask(self, number: int, suite: str) -> Suite:
        directory = f"dists/{suite}"
        answers = await self._mirror.small_files(number).fetch_all(
            (
                (f"{directory}/InRelease", MAX_RELEASE_BYTES),
                (f"{directory}/Release", MAX_RELEASE_BYTES),
                (f"{directory}/Release.gpg", MAX_SIGNATURE_BYTES),
            )
        )
        found = {path.rpartition("/")[2]: data for path, data in answers.items()}
        url = self._mirror.url(number)
        content, files, name = await self._mirror.run(self._believe, found, directory, url)
        release = read_release(content, name)
        if release.valid_until is not None and release.valid_until < self._now:
            raise MirrorError(
                f"{name} is stale: it was valid until {release.valid_until:%Y-%m-%d %H:%M} UTC"
            )
        before = await self._mirror.run(self._before, directory)
        _check_not_older(before, release, name)
        return Suite(directory, release, files, before)

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
