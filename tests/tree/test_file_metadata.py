"""What an entry of a tree says of a file, and what is believed of it."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.tree.file_metadata import RestoredMetadata, entry_metadata, restored


def status(mode: int = stat.S_IFREG | 0o640, mtime_ns: int = 1_700_000_000_250_000_001) -> Any:
    """What ``os.stat`` would say."""
    seconds = mtime_ns // 10**9
    return os.stat_result(
        (mode, 77, 88, 1, 1000, 1001, 5, 1, seconds, 9),
        {
            "st_atime": 1.0,
            "st_mtime": seconds + 1e-9 * (mtime_ns % 10**9),
            "st_ctime": 9.0,
            "st_atime_ns": 1,
            "st_mtime_ns": mtime_ns,
            "st_ctime_ns": 9,
        },
    )


class MetadataTests(SynchronousTestCase):
    """Written and read again."""

    def there_and_back(self, metadata: dict[str, Any]) -> RestoredMetadata:
        """Return what is restored of metadata that went through a directory."""
        kept: RestoredMetadata = restored(json.loads(json.dumps(metadata)))
        return kept

    def test_a_file(self) -> None:
        """Its mode, and its time to the nanosecond, which no float holds."""
        written = entry_metadata(status())
        self.assertEqual(
            json.dumps(written),
            '{"mtime": 1700000000.25, "st_mode": 33184, "st_uid": 1000, "st_gid": 1001, '
            '"pipegrid": {"mode": 416, "mtime_ns": 1700000000250000001}}',
        )
        self.assertEqual(
            self.there_and_back(written), RestoredMetadata(0o640, 1_700_000_000_250_000_001)
        )

    def test_what_changes_by_itself_is_not_written(self) -> None:
        """Inode, device and ctime would make new caps of trees that are the same."""
        self.assertTrue({"ctime", "st_ino", "st_dev"}.isdisjoint(entry_metadata(status())))

    def test_links(self) -> None:
        """What they lead to, whatever bytes that is."""
        for link in (b"../a b", "caf\u00e9".encode(), b"caf\xe9", b"%E9", b"\xff" * 4000):
            written = entry_metadata(status(stat.S_IFLNK | 0o777), link=link)
            self.assertEqual(self.there_and_back(written).link, link)

    def test_names(self) -> None:
        """The bytes of a name that no entry could have."""
        for name in (b"caf\xe9", "cafe\u0301".encode(), b"\n\xff"):
            self.assertEqual(self.there_and_back(entry_metadata(status(), name=name)).name, name)

    def test_tahoe_backups(self) -> None:
        """Their mode and time are brought back, too."""
        kept = restored({"ctime": 5.5, "mtime": 1.5, "st_mode": 0o100600, "st_ino": 4})
        self.assertEqual(kept, RestoredMetadata(0o600, 1_500_000_000))

    def test_far_years(self) -> None:
        """Nanoseconds since 1970 may have more than 64 bits: file systems know years beyond 2262."""
        for mtime_ns in (-(10**19), 1 << 63, 15_032_385_535 * 10**9):
            kept = self.there_and_back(entry_metadata(status(mtime_ns=mtime_ns)))
            self.assertEqual(kept.mtime_ns, mtime_ns)

    def test_nobody_else_runs_it(self) -> None:
        """A file is not brought back set-user-ID; a directory passes its group on as it did."""
        self.assertEqual(restored(entry_metadata(status(0o107755))).mode, 0o1755)
        self.assertEqual(restored(entry_metadata(status(0o046775))).mode, 0o2775)

    def test_nonsense(self) -> None:
        """What is no mode, time, link or name counts as not said."""
        cases: list[Any] = [None, True, "7", -1, 1e300, [], {}, 1 << 70]
        for nonsense in cases:
            ours = {"mode": nonsense, "mtime_ns": nonsense, "link": nonsense and [nonsense]}
            self.assertEqual(
                restored({"pipegrid": ours | {"name_quoted": [nonsense]}, "mtime": 3}),
                RestoredMetadata() if nonsense != -1 else RestoredMetadata(mtime_ns=-1),
            )
            if nonsense != -1:
                self.assertEqual(
                    restored({"mtime": nonsense, "st_mode": nonsense}), RestoredMetadata()
                )
        for link in ("", "a\0b", "\ud800", "x" * (1 << 20)):
            self.assertIsNone(restored({"pipegrid": {"link": link}}).link)
        self.assertEqual(restored({"pipegrid": 5, "mtime": float("nan")}), RestoredMetadata())
