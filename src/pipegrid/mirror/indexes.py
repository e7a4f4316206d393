"""
Indexes, staged: as the archive packs them, or unpacked, brought up to date by patches.

**Why two forms.** A release file tells the hash of each packed form, and packing anew gives other bytes.
So whoever publishes an index packed has to fetch it packed, and patches save him nothing. What the release
file also tells is the hash of the index unpacked: kept like this, patches are enough, and the index that
was published last is what they are for, so that nothing is kept besides. The same index compressed here
(``compressed``) takes less room, for programs that read it; no release file names it, so apt does not.

**What proves it.** Each patch is proven by its hash before it is unpacked, and what comes out by the hash
in the release file, which proves index, patches, and their order. If there is no chain of patches, if it
costs more bytes than the packed index, or if anything of it is wrong, the packed index is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import dirname, join
from typing import TYPE_CHECKING, NamedTuple

from pipegrid.mirror import compressed
from pipegrid.mirror.deb822 import MAX_RELEASE_BYTES, PatchStep, read_patch_index
from pipegrid.mirror.destination import STAGED, WrongResult
from pipegrid.mirror.obtain import obtain
from pipegrid.mirror.patching import MAX_PATCHES, apply_patches
from pipegrid.mirror.unpacking import PatchError
from pipegrid.mirror.wanted import BadEntry, MirrorError, Wanted

if TYPE_CHECKING:
    from pipegrid.mirror.early import AnyMirror


class Unpacked(NamedTuple):
    """
    An index that is to be there unpacked.

    Attributes:
        target: what is wanted.
        packed: in which forms it can be fetched, the best first.
        patches: the ``Index`` of its patches, if it has any.
        have: where an older one is, below the destination, and what is in it, unpacked.
        compressed: it is kept compressed; see ``compressed``.
    """

    target: Wanted
    packed: tuple[Wanted, ...]
    patches: Wanted | None
    have: tuple[str, Wanted] | None
    compressed: bool = False


class Updated:
    """
    What has become of them.

    Attributes:
        fetched_bytes: of patches, their lists, and packed indexes.
        patched: indexes that patches brought up to date.
    """

    def __init__(self) -> None:
        self.fetched_bytes = self.patched = 0


_BY_HASH = {"sha256": "SHA256", "sha512": "SHA512"}


def by_hash(path: str, algorithm: str, digest: bytes) -> str | None:
    """Return where archives that have indexes by hash have this one, by this hash."""
    kind = _BY_HASH.get(algorithm)
    return None if kind is None else join(dirname(path), "by-hash", kind, digest.hex())


async def update(
    mirror: AnyMirror, wants: Sequence[Unpacked], patches_are_kept: bool = False
) -> Updated:
    """
    Have these unpacked, where nobody sees them.

    Args:
        patches_are_kept: patches may be seen as soon as they are there.

    Raises:
        MirrorError: one can be had in no way.
    """
    done = Updated()
    missing = await mirror.run(_missing, mirror, wants)
    chains = await _chains(mirror, missing, done)
    patches = [step.packed for _, chain in chains for step in chain if step.packed is not None]
    got = await obtain(mirror, patches, staged=not patches_are_kept)
    done.fetched_bytes += got.size_bytes
    for want, chain in chains:
        if await mirror.run(_apply, mirror, want, chain):
            done.patched += 1
    missing = await mirror.run(_missing, mirror, missing)
    for attempt in range(max((len(want.packed) for want in missing), default=0)):
        forms = [want.packed[attempt] for want in missing if attempt < len(want.packed)]
        got = await obtain(mirror, forms)
        done.fetched_bytes += got.size_bytes
        for want in missing:
            if attempt < len(want.packed) and want.packed[attempt].path not in got.lacking:
                await mirror.run(_unpack, mirror, want, want.packed[attempt])
        missing = await mirror.run(_missing, mirror, missing)
    if missing:
        raise MirrorError(
            f"the index {missing[0].target.path} could not be fetched in any form; the old one stays"
        )
    return done


def _missing(mirror: AnyMirror, wants: Sequence[Unpacked]) -> list[Unpacked]:
    return [want for want in wants if kept_as(mirror, want) is None]


def kept_as(mirror: AnyMirror, want: Unpacked) -> Wanted | None:
    """In the thread: return the file that an index is kept as, staged or seen; None: it is not there."""
    destination = mirror.destination
    if want.compressed:
        return compressed.find(destination, want.target)
    return want.target if destination.is_there(want.target, staged=True) else None


def _made(mirror: AnyMirror, want: Unpacked) -> None:
    if want.compressed:
        compressed.compress(mirror.destination, want.target)


Chain = tuple[Unpacked, tuple[PatchStep, ...]]


async def _chains(mirror: AnyMirror, wants: Sequence[Unpacked], done: Updated) -> list[Chain]:
    """Fetch the lists of patches, all at once; return what can be patched, and by which."""
    able = [want for want in wants if _may_pay(want)]
    lists = [want.patches for want in able if want.patches is not None]
    got = await obtain(mirror, lists)
    done.fetched_bytes += got.size_bytes
    return await mirror.run(_choose, mirror, able)


def _full_bytes(want: Unpacked) -> int:
    return (want.packed[0].size if want.packed else want.target.size) or 0


def _may_pay(want: Unpacked) -> bool:
    """Whether it is worth it to look at the list of patches, before anything is known of them."""
    patches = want.patches
    if want.have is None or patches is None or patches.size is None:
        return False
    return patches.size < min(_full_bytes(want), MAX_RELEASE_BYTES)


def _choose(mirror: AnyMirror, wants: Sequence[Unpacked]) -> list[Chain]:
    chosen = []
    for want in wants:
        assert want.patches is not None
        assert want.have is not None
        path = want.patches.path
        data = mirror.destination.read(f"{STAGED}/{path}", MAX_RELEASE_BYTES)
        if data is None:
            data = mirror.destination.read(path, MAX_RELEASE_BYTES)
        try:
            index = read_patch_index(data or b"", dirname(path), path)
        except BadEntry:
            continue
        chain = index.chain(want.have[1].digest)
        if not chain or len(chain) > MAX_PATCHES or index.current != want.target.digest:
            continue
        cost = sum(step.packed.size or 0 for step in chain if step.packed is not None)
        if all(step.packed is not None for step in chain) and cost < _full_bytes(want):
            chosen.append((want, chain))
    return chosen


def _apply(mirror: AnyMirror, want: Unpacked, chain: Sequence[PatchStep]) -> bool:
    """In the thread: patch one index; returns whether that gave what is wanted."""
    assert want.have is not None
    destination = mirror.destination
    index = f"{destination.path}/{want.have[0]}"
    patches = [
        destination.staged_path(step.packed.path) for step in chain if step.packed is not None
    ]
    try:
        destination.make(
            want.target,
            lambda fd: apply_patches(index, patches, fd, want.target.size).digest,
            staged=True,
        )
    except (PatchError, FileNotFoundError, WrongResult):
        return False
    _made(mirror, want)
    return True


def _unpack(mirror: AnyMirror, want: Unpacked, form: Wanted) -> None:
    """In the thread: unpack what was fetched, unless it is the unpacked index itself."""
    if form.path != want.target.path:
        packed = mirror.destination.staged_path(form.path)
        mirror.destination.make(
            want.target,
            lambda fd: apply_patches(packed, (), fd, want.target.size).digest,
            staged=True,
        )
    _made(mirror, want)
