"""Lists of files: only ``BadEntry`` is raised; what is read is within bounds, and read back as the same."""

from __future__ import annotations

import io
import os

from pipegrid.mirror.archive_file import DIGEST_BYTES, BadEntry
from pipegrid.mirror.file_list_format import lines_of, list_line, read_list


def run(data: bytes) -> None:
    """Read the list, and what is written of it."""
    try:
        found = list(read_list(lines_of(io.BytesIO(data)), "x"))
    except BadEntry as error:
        assert str(error)
        assert "\n" not in str(error), "a refusal of several lines"
        return
    for each in found:
        assert os.path.normpath(f"/root/{each.path}") == f"/root/{each.path}", "it leads elsewhere"
        assert len(each.digest) == DIGEST_BYTES[each.algorithm]
    written = [list_line(each) for each in found]
    assert list(read_list(written, "x")) == found, "it is read back as another"


def seeds() -> dict[str, bytes]:
    """Return lists, good and bad."""
    digest = b"0123456789abcdef" * 4
    return {
        "good": b"# all\n\n" + digest + b"  3\tpool/a b.deb\r\n" + digest * 2 + b" 0 x\n",
        "leads-out": digest + b" 3 ../x\n",
        "no-size": digest + b" x\n",
        "not-text": digest + b" 3 \xff\n",
    }
