"""Shares have the recorded headers and lengths, and odd headers are refused."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import layout, ueb
from pipegrid.core.encoding_parameters import Params
from tests import vectors


class LayoutTests(SynchronousTestCase):
    """Offsets of a share's sections."""

    def test_recorded_layouts(self) -> None:
        """Sizes from 56 bytes to 2 ** 50, on both sides of the switch to version 2."""
        cases = vectors.load("layout")["cases"]
        for case in cases:
            geometry = Params(case["k"], case["n"], case["max_segment_size"]).geometry(case["size"])
            self.assertEqual(geometry.segment_bytes, case["segment_size"])
            self.assertEqual(geometry.num_segments, case["num_segments"])
            self.assertEqual(geometry.block_bytes, case["block_size"])
            self.assertEqual(geometry.share_data_bytes, case["share_data_size"])
            self.assertEqual(ueb.packed_length(geometry), case["ueb_length"])
            share = layout.for_geometry(geometry)
            self.assertEqual(share.version, case["version"])
            self.assertEqual(share.pack_header().hex(), case["header_hex"])
            self.assertEqual(len(share.pack_header()), share.header_bytes)
            self.assertEqual(layout.share_length(geometry, share), case["share_length"])
            self.assertEqual(layout.parse_header(bytes.fromhex(case["header_hex"])), share)
        self.assertEqual(len(cases), 15)

    def test_recorded_shares(self) -> None:
        """The recorded shares begin with the header that we write, and are as long as we say."""
        compared = 0
        for case in vectors.load("immutable")["cases"]:
            if case["format"] == "lit":
                continue
            size = len(vectors.plaintext(case["plaintext"]))
            geometry = Params(case["k"], case["n"], case["max_segment_size"]).geometry(size)
            force = 2 if case["name"].startswith("forced-v2") else None
            share = layout.for_geometry(geometry, force)
            self.assertEqual(
                layout.share_length(geometry, share), case["share_length"], case["name"]
            )
            recorded = [bytes.fromhex(text) for text in case.get("share_hex", ())]
            for data in recorded:
                self.assertEqual(data[: share.header_bytes], share.pack_header(), case["name"])
                end = share.uri_extension + share.ueb_length_bytes
                packed = data[end:]
                self.assertEqual(share.pack_ueb(packed), data[share.uri_extension :])
                self.assertEqual(len(packed), ueb.packed_length(geometry))
                compared += 1
        self.assertGreater(compared, 20)

    def test_refuses_nonsense(self) -> None:
        """Headers of no version, cut short, or with impossible sections are refused."""
        good = layout.for_geometry(Params().geometry(1000))
        bad = [b"", b"\0", bytes(4), bytes(36), (3).to_bytes(4, "big") + bytes(64)]
        bad += [good.pack_header()[:35], good._replace(version=2).pack_header()[:67]]
        for change in (
            {"uri_extension": good.share_hashes - 34},
            {"uri_extension": good.uri_extension + 1},
            {"share_hashes": good.block_hashes - 34},
            {"block_hashes": good.block_hashes + 1},
            {"block_hashes": good.share_hashes + 32},
        ):
            bad.append(good._replace(**change).pack_header())
        for data in bad:
            with self.assertRaises(ValueError, msg=data.hex()):
                layout.parse_header(data)

    def test_accepts_sections_elsewhere(self) -> None:
        """Offsets are trusted where they make sense: foreign writers may leave gaps."""
        good = layout.for_geometry(Params().geometry(1000))
        moved = good._replace(data=1000, crypttext_hash_tree=50, unused=9)
        self.assertEqual(layout.parse_header(moved.pack_header() + b"more"), moved)

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.sampled_from([b"", b"\0\0\0\1", b"\0\0\0\2"]), st.binary(max_size=80))
    def test_any_bytes(self, start: bytes, rest: bytes) -> None:
        """Whatever a server sends, it is a layout that packs to the same bytes or a ValueError."""
        data = start + rest
        try:
            share = layout.parse_header(data)
        except ValueError:
            return
        self.assertEqual(share.pack_header(), data[: share.header_bytes])
