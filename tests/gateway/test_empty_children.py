"""Children without any capability, with which magic-folder says that a file was deleted."""

from __future__ import annotations

from pipegrid.core.caps import DirectoryCap, LitCap, UnknownCap
from pipegrid.core.packed_directory import PackedChild, pack_immutable
from pipegrid.gateway.web_api.children_json import immutable_child
from tests.gateway.gateway_world import GatewayTestCase


class EmptyChildTests(GatewayTestCase):
    def test_in_an_immutable_directory(self) -> None:
        """It is stored as Tahoe-LAFS stores it, and listed with its metadata."""
        for given in ({}, {"ro_uri": None}, {"ro_uri": ""}):
            self.assertEqual(immutable_child(given), UnknownCap(""))
        child = PackedChild("content", UnknownCap(""), {"a": 1})
        packed = pack_immutable([child])
        self.assertEqual(packed, b'27:7:content,0:,0:,8:{"a": 1},,')
        listed = self.world.run(self.grid.directory(DirectoryCap(LitCap(packed))).list())
        self.assertIsNone(listed["content"].read_cap)
        self.assertEqual(listed["content"].metadata, {"a": 1})
