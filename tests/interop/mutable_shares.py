"""
The shares of mutable files, straight between our core and Tahoe-LAFS's storage directories.

What its gateway wrote is read by our core from its servers' disks; what our core wrote is put onto their
disks, and its gateway reads it, changes it and lists it. No transport of ours takes part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.core.caps import Cap, DirectoryCap, MutableCap, parse_cap
from pipegrid.core.hashes import write_enabler
from pipegrid.core.mutable.decoder import VersionReader
from pipegrid.core.mutable.directory_content_edits import (
    Edit,
    Link,
    Rename,
    Unlink,
    apply_edits,
    unpack_entries,
)
from pipegrid.core.mutable.encoder import EncodedVersion, encode
from pipegrid.core.mutable.keys import generate
from pipegrid.core.mutable.mutable_share import MutableShare, VerifiedVersions
from pipegrid.core.mutable.range_update import RangeUpdate
from pipegrid.core.mutable.versions import Format, MutableGeometry, Version, next_sequence_number
from pipegrid.storage.mutable import slot_file
from pipegrid.storage.mutable.slot_file import DATA_OFFSET, MutableHeader
from tests.interop.processes import TahoeGrid

SERVERS = 3
SHARES = (2, 3, 3)
SIZES = (0, 1, 1000, 131_072, 131_073, 500_000)


class Disks:
    """The servers' directories of shares."""

    def __init__(self, grid: TahoeGrid) -> None:
        self._roots = [server.directory / "storage" / "shares" for server in grid.servers]
        self.node_ids: dict[Path, bytes] = {}

    def files(self, storage_index: bytes) -> dict[int, Path]:
        """Return where the shares of a slot are."""
        name = base32.encode(storage_index)
        return {
            int(path.name): path
            for root in self._roots
            for path in sorted((root / name[:2] / name).glob("*"))
        }

    def read(self, storage_index: bytes) -> dict[int, bytes]:
        """Return the share data of a slot."""
        found = {}
        for number, path in self.files(storage_index).items():
            raw = path.read_bytes()
            header = slot_file.parse_header(raw)
            self.node_ids[path.parents[2]] = header.node_id
            found[number] = raw[DATA_OFFSET : DATA_OFFSET + header.data_bytes]
        return found

    def write(self, storage_index: bytes, shares: Mapping[int, bytes]) -> None:
        """Replace the share data of a slot that is there; leases and secrets stay."""
        for number, path in self.files(storage_index).items():
            raw = path.read_bytes()
            header = slot_file.parse_header(raw)
            leases = raw[slot_file.LEASES_OFFSET : DATA_OFFSET]
            path.write_bytes(self._container(header, leases, shares[number]))

    def place(self, storage_index: bytes, writekey: bytes, shares: Mapping[int, bytes]) -> None:
        """Put a new slot's shares onto the servers, one on each."""
        name = base32.encode(storage_index)
        for number, root in enumerate(self._roots):
            node_id = self.node_ids[root]
            directory = root / name[:2] / name
            directory.mkdir(parents=True)
            header = slot_file.parse_header(
                slot_file.pack_empty(node_id, write_enabler(writekey, node_id))
            )
            leases = bytes(DATA_OFFSET - slot_file.LEASES_OFFSET)
            (directory / str(number)).write_bytes(self._container(header, leases, shares[number]))

    def _container(self, header: MutableHeader, leases: bytes, data: bytes) -> bytes:
        size = len(data)
        changed = MutableHeader(
            header.version, header.node_id, header.write_enabler, size, DATA_OFFSET + size
        )
        return changed.pack() + leases + data + bytes(slot_file.COUNT_BYTES)


def file_of(cap: Cap) -> MutableCap:
    """Return the file in which a directory is, or the file itself."""
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    assert isinstance(file, MutableCap)
    return file


class MutableSharesTests(SynchronousTestCase):
    """Both read what either wrote."""

    def setUp(self) -> None:
        root = Path(self.mktemp()).absolute()
        self.tahoe = TahoeGrid(root, SERVERS)
        self.addCleanup(self.tahoe.stop)
        self.gateway = self.tahoe.start_gateway(root / "gateway", SHARES)
        self.addCleanup(self.gateway.stop)
        self.disks = Disks(self.tahoe)
        self.random = Random(20)

    def test_all(self) -> None:
        """One grid for all, since it takes its seconds to start."""
        for format in Format:
            for size in SIZES:
                self._file(format, size)
            self._made_here(format)
            self._directory(format)
        self._ranges()

    def _read(self, cap: Cap) -> tuple[VerifiedVersions, Version, bytes]:
        """Read a file from the disks with any k shares, by a read cap; open its key with the write cap."""
        file = file_of(cap)
        shares = self.disks.read(file.storage_index)
        self.assertEqual(len(shares), SHARES[2])
        contents = set()
        versions = set()
        book = VerifiedVersions(file)
        for numbers in ((0, 1), (1, 2), (0, 2)):
            reader: VersionReader | None = None
            for number in numbers:
                share = MutableShare.of(number, shares[number])
                version = VerifiedVersions(file.readonly()).check(share)
                assert version is not None
                assert book.check(share) == version
                book.open_signing_key(share)
                reader = reader or VersionReader(version, file.readonly().secret)
                reader.add_share(share)
            assert reader is not None
            made = reader.whole()
            self.assertEqual(reader.corrupt, [])
            assert made is not None
            contents.add(made)
            versions.add(reader.version)
        self.assertEqual((len(contents), len(versions)), (1, 1))
        return book, versions.pop(), contents.pop()

    def _encode(
        self, content: bytes, format: Format, book: VerifiedVersions, version: Version
    ) -> EncodedVersion:
        geometry = MutableGeometry(format, len(content), SHARES[0], SHARES[2])
        assert book.signing_key is not None
        return encode(
            content,
            geometry,
            next_sequence_number(version.sequence_number),
            book.signing_key,
            [self.random.randbytes(16) for _ in range(geometry.num_salts)],
        )

    def _write(self, cap: Cap, encoded: EncodedVersion) -> None:
        shares = {number: encoded.share(number) for number in encoded.writes}
        self.disks.write(file_of(cap).storage_index, shares)

    def _file(self, format: Format, size: int) -> None:
        """Theirs, ours over it, theirs over that."""
        content = self.random.randbytes(size)
        cap = parse_cap(self.gateway.put(content, f"?format={format.name}"))
        book, version, found = self._read(cap)
        self.assertEqual((found, version.sequence_number, version.format), (content, 1, format))
        ours = self.random.randbytes(size + 7)
        self._write(cap, self._encode(ours, format, book, version))
        self.assertEqual(self.gateway.get(str(cap)), ours)
        self.assertEqual(self.gateway.get(str(cap.readonly())), ours)  # type: ignore[union-attr]
        theirs = self.random.randbytes(size // 2)
        self.gateway.request("PUT", f"uri/{cap}", theirs)
        _, version, found = self._read(cap)
        self.assertEqual((found, version.sequence_number), (theirs, 3))
        told = self.gateway.check(str(cap))
        self.assertTrue(told["results"]["healthy"], told)

    def _made_here(self, format: Format) -> None:
        """A file that was never theirs: read, checked and overwritten by them."""
        key = generate()
        content = self.random.randbytes(200_000)
        geometry = MutableGeometry(format, len(content), SHARES[0], SHARES[2])
        salts = [self.random.randbytes(16) for _ in range(geometry.num_salts)]
        encoded = encode(content, geometry, 1, key, salts)
        shares = {number: encoded.share(number) for number in encoded.writes}
        self.disks.place(key.storage_index, key.writekey, shares)
        cap = key.cap(format)
        self.assertEqual(self.gateway.get(str(cap.readonly())), content)
        self.gateway.request("PUT", f"uri/{cap}", b"theirs now")
        _, version, found = self._read(cap)
        self.assertEqual((found, version.sequence_number), (b"theirs now", 2))

    def _ranges(self) -> None:
        """Partial updates, ours and theirs, one upon the other."""
        expected = bytearray(self.random.randbytes(700_000))
        cap = parse_cap(self.gateway.put(bytes(expected), "?format=MDMF"))
        for turn, (offset, length) in enumerate(
            ((300_000, 200), (131_072 * 2, 131_072 * 2), (700_000, 10), (650_000, 400_000), (0, 1))
        ):
            data = self.random.randbytes(length)
            if turn % 2:
                self.gateway.request("PUT", f"uri/{cap}?offset={offset}", data)
            else:
                self._change(cap, offset, data)
            expected[offset : offset + length] = data
            self.assertEqual(self.gateway.get(str(cap)), bytes(expected))
            _, version, found = self._read(cap)
            self.assertEqual(found, bytes(expected))
            self.assertEqual(version.sequence_number, turn + 2)

    def _change(self, cap: Cap, offset: int, data: bytes) -> None:
        book, version, _ = self._read(cap)
        file = file_of(cap)
        shares = self.disks.read(file.storage_index)
        update = RangeUpdate(version, offset, len(data), file.readonly().secret)
        for number, share in shares.items():
            update.add_share(MutableShare.of(number, share))
        while (job := update.next_job()) is not None:
            self.assertTrue(update.finish(job.run()))
        assert book.signing_key is not None
        salts = [self.random.randbytes(16) for _ in update.touched]
        encoded = update.encode(data, version.sequence_number + 1, book.signing_key, salts)
        changed = {}
        for number, share in shares.items():
            new = bytearray(share)
            for write in encoded.writes[number]:
                joined = b"".join(write.pieces)
                new.extend(bytes(max(0, write.offset - len(new))))
                new[write.offset : write.offset + len(joined)] = joined
            changed[number] = bytes(new)
        self.disks.write(file.storage_index, changed)

    def _list(self, cap: Cap) -> dict[str, Any]:
        told = json.loads(self.gateway.request("GET", f"uri/{cap}?t=json"))
        children: dict[str, Any] = told[1]["children"]
        return children

    def _directory(self, format: Format) -> None:
        """Children linked by either are listed, with their caps, and carried on by the other."""
        made = self.gateway.request("POST", f"uri?t=mkdir&format={format.name}").decode()
        cap = parse_cap(made)
        child = self.gateway.put(b"mutable child", "?format=SDMF")
        literal = self.gateway.put(b"literal")
        for name, target in (("one", child), ("two", literal)):
            self.gateway.request("PUT", f"uri/{cap}/{name}?t=uri", target.encode())
        book, version, before = self._read(cap)
        writekey = file_of(cap).secret
        self.assertEqual(str(unpack_entries(before)["one"].write_cap(writekey)), child)
        changes: list[Edit] = [
            Link("e\u0301", parse_cap(child), metadata={"ours": [1, "ü"]}),
            Rename("two", "deux"),
            Link("ro", parse_cap(child).readonly()),  # type: ignore[union-attr]
            Link("future", parse_cap("lafs://w"), parse_cap("ro.lafs://r")),
        ]
        after = apply_edits(before, changes, writekey, time.time())
        self._write(cap, self._encode(after, format, book, version))
        listed = self._list(cap)
        self.assertEqual(sorted(listed), ["deux", "future", "one", "ro", "é"])
        self.assertEqual(listed["é"][1]["rw_uri"], child)
        self.assertEqual(listed["é"][1]["metadata"]["ours"], [1, "ü"])
        self.assertEqual(listed["deux"][1]["ro_uri"], literal)
        self.assertNotIn("rw_uri", listed["ro"][1])
        self.assertEqual(listed["future"][1]["rw_uri"], "lafs://w")
        self.gateway.request("PUT", f"uri/{cap}/three?t=uri", literal.encode())
        book, version, theirs = self._read(cap)
        ours, now = unpack_entries(after), unpack_entries(theirs)
        self.assertEqual({name: now[name] for name in ours}, ours)
        gone = apply_edits(theirs, [Unlink("one")], writekey, time.time())
        self._write(cap, self._encode(gone, format, book, version))
        self.assertEqual(sorted(self._list(cap)), ["deux", "future", "ro", "three", "é"])
