"""Read bundles at the GBS server: they answer what requests for each share would."""

from __future__ import annotations

from unittest import mock

from pipegrid.wire import gbs_bundles, gbs_paths_headers
from pipegrid.wire.gbs_bundles import MAX_READ_BUNDLE_BYTES, BundledRead
from tests.server.gbs.support import (
    Reply,
    ServerTestCase,
    allocate,
    head,
    lease_headers,
    list_shares,
    read,
    write,
)
from tests.storage.support import SI
from tests.wire.test_cbor import BOMBS

DATA = bytes(range(200))
NOBODY = b"n" * 16


class ReadBundleTests(ServerTestCase):
    """Many shares in one request."""

    def read(self, *reads: BundledRead) -> list[bytes | int]:
        """Return what is answered to them."""
        body = gbs_bundles.pack_reads(reads)
        return gbs_bundles.unpack_read_answers(self.post(body).body, reads)

    def post(self, body: bytes, *lines: bytes) -> Reply:
        """Return the answer to any body."""
        [reply] = self.ask(
            head("POST", gbs_paths_headers.READ_BUNDLE_PATH, *lines, body=body) + body
        )
        return reply

    def setUp(self) -> None:
        super().setUp()
        self.ask(allocate((0, 3), 200), write(0, 0, DATA), write(3, 0, DATA[::-1]))

    def test_as_plain_requests(self) -> None:
        """Whole shares, beginnings, and what is not there."""
        found = self.read(
            BundledRead(SI, 0, 200),
            BundledRead(SI, 3, 5000),
            BundledRead(SI, 3, 7),
            BundledRead(SI, 1, 5),
            BundledRead(NOBODY, 0, 5),
            BundledRead(SI, 256, 1),
        )
        self.assertEqual(found, [DATA, DATA[::-1], DATA[::-1][:7], 404, 404, 404])
        whole, missing = self.ask(read(0, 0, 200), read(1, 0, 5))
        self.assertEqual((whole.body, missing.status), (DATA, 404))
        self.assertEqual(self.service.requests["read bundle", 200], 1)

    def test_a_refusal_is_its_own(self) -> None:
        """What fails of one read does not touch the others."""
        open_share = self.store.open_share

        def fail(index: bytes, number: int) -> object:
            if number == 3:
                raise OSError("io")
            return open_share(index, number)

        with mock.patch.object(self.store, "open_share", side_effect=fail):
            found = self.read(BundledRead(SI, 3, 200), BundledRead(SI, 0, 200))
        self.assertEqual(found, [500, DATA])
        self.flushLoggedErrors(OSError)

    def test_memory(self) -> None:
        """What is asked for is counted before it is read; beyond the bound the bundle is refused."""
        body = gbs_bundles.pack_reads([BundledRead(SI, 0, 64 * 1024)])
        with (
            mock.patch("pipegrid.server.gbs.storage_operations.MAX_HELD_BYTES", 64 * 1024),
            mock.patch.object(self.store, "open_share") as opened,
        ):
            self.assertEqual(self.post(body).status, 503)
        opened.assert_not_called()
        self.assertEqual(self.service._held_bytes, 0)
        self.assertEqual(self.post(body).status, 200)
        self.assertEqual(self.service._held_bytes, 0)

    def test_what_is_refused(self) -> None:
        """No message, too long a one, bombs, the wrong secret: as other messages are."""
        self.assertEqual(self.post(b"x").status, 400)
        self.assertEqual(self.post(bytes(MAX_READ_BUNDLE_BYTES + 1)).status, 413)
        for bomb in BOMBS.values():
            self.assertIn(self.post(bomb).status, (400, 413))
        self.assertEqual(self.post(b"\x80", b"Accept: text/html").status, 406)
        self.assertEqual(self.post(b"\x80", *lease_headers()).status, 400)
        wrong = head("POST", gbs_paths_headers.READ_BUNDLE_PATH, body=b"\x80").replace(
            b"Tahoe-LAFS", b"Nobody"
        )
        self.assertEqual(self.statuses(wrong + b"\x80"), [401])
        self.assertEqual(self.statuses(head("GET", gbs_paths_headers.READ_BUNDLE_PATH)), [405])

    def test_lists_offer_bundles(self) -> None:
        """A client that only reads learns from the first list what the server takes."""
        slot = gbs_paths_headers.shares_path(SI).replace("immutable", "mutable")
        for request in (list_shares(), head("GET", slot)):
            [reply] = self.ask(request)
            self.assertEqual(reply.headers["pipegrid-bundles"], "1048576")
