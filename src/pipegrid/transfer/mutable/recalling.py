"""
What a caller remembers of a file, held against what is remembered of its versions.

The newest version of a file is remembered beyond the process (``known``), its content is not: that is for
whoever keeps it anyway. With both, a change needs one round trip. What the caller says is not believed: coded
again with the salt of the version it must give its root hash.
"""

from __future__ import annotations

from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable.encoding import encode
from pipegrid.core.mutable.geometry import Format, MutableGeometry
from pipegrid.core.mutable.keys import open_signing_key
from pipegrid.errors import CorruptionError
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.mutable.known import MAX_CONTENT_BYTES, KnownFiles


async def recall(files: KnownFiles, cap: MutableCap, content: bytes, workers: CpuWorkers) -> bool:
    """
    Take content for that of the newest version that was seen, if it is; returns whether it is known now.

    Only of SDMF, whose version has the one salt; MDMF has its salts on the servers.

    Args:
        cap: a write cap.
        content: what the caller thinks that it is.
    """
    known = files.of(cap.storage_index)
    version = known.version
    if known.content is not None:
        return True
    if version is None or version.format is not Format.SDMF or len(content) > MAX_CONTENT_BYTES:
        return False
    if version.size != len(content) or version.sequence_number < known.sequence_number:
        return False
    if known.signing_key is None:
        try:
            known.signing_key = open_signing_key(known.encrypted_key, cap, 0)
        except CorruptionError:
            return False
    geometry = MutableGeometry(
        version.format, version.size, version.required_shares, version.total_shares
    )
    encoded = await workers.run_if_large(
        6 * len(content),
        encode,
        content,
        geometry,
        version.sequence_number,
        known.signing_key,
        [version.salt],
        frozenset(),
    )
    if encoded.version != version or known.version != version:
        return False
    known.content = content
    return True
