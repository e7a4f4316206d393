"""Announcements: keys, signatures, what is news, and everything that strangers may send."""

from __future__ import annotations

import json
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.wire import server_address
from pipegrid.wire.announcements import (
    FURL,
    MAX_KEPT_BYTES,
    MAX_MESSAGE_BYTES,
    NURLS,
    Announcement,
    AnnouncementKey,
    AnnouncementRecords,
    describe,
    make_signing_key,
    parse_signing_key,
    sign,
    verify,
)
from tests import vectors

RECORDED = vectors.load("introducer")
FIELDS = RECORDED["announcement"]
SIGNED = (
    bytes.fromhex(RECORDED["signed"]["msg_hex"]),
    RECORDED["signed"]["sig"].encode(),
    RECORDED["signed"]["key"].encode(),
)
KEY = AnnouncementKey(bytes.fromhex(RECORDED["signing_key_raw"]))
SERVER_ID = RECORDED["signed"]["key"]


def announcement(key: AnnouncementKey = KEY, **fields: Any) -> Announcement:
    """Return an announcement with other fields than those recorded."""
    return verify(sign({**FIELDS, **fields}, key))


class SigningTests(SynchronousTestCase):
    """Keys and signatures are those of Tahoe-LAFS."""

    def test_the_address_of_a_furl_is_harmless(self) -> None:
        """What a stranger announces as a hint commands no terminal where it is shown."""
        for bad in ("\x1b]0;x\x07", "\ud800", "\u202e"):
            known = server_address.parse_furl(f"pb://{'a' * 32}@{bad},tcp:127.0.0.1:1/x")
            self.assertTrue(known.has_address)
            self.assertTrue(known.address.isprintable(), repr(known.address))

    def test_recorded(self) -> None:
        """The recorded announcement verifies, and ours is the same, byte for byte."""
        known = verify(SIGNED)
        self.assertEqual(known.fields, FIELDS)
        self.assertEqual((known.server_id, known.seqnum), (SERVER_ID, 1))
        self.assertEqual(sign(FIELDS, KEY), SIGNED)

    def test_keys(self) -> None:
        """The texts of a key are those in a node's files."""
        self.assertEqual(parse_signing_key(RECORDED["signing_key"]), KEY)
        self.assertEqual(str(KEY), RECORDED["signing_key"])
        self.assertEqual(KEY.public_text, RECORDED["verifying_key"])
        self.assertNotEqual(make_signing_key(), make_signing_key())
        self.assertNotIn(RECORDED["signing_key"][8:], repr(KEY))
        for text in ("", "pub-v0-aaaa", "priv-v0-aaaa", "priv-v0-1", "priv-v1-" + "a" * 52):
            with self.assertRaises(ValueError):
                parse_signing_key(text)

    def test_every_changed_byte_is_noticed(self) -> None:
        """Whatever byte of the three is changed, the announcement is skipped."""
        for part, text in enumerate(SIGNED):
            for place in range(0, len(text), 7):
                changed = list(SIGNED)
                changed[part] = text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]
                with self.assertRaises(ValueError):
                    verify(tuple(changed))

    def test_malformed(self) -> None:
        """Anything can come; each is refused with one sentence."""
        message, signature, key = SIGNED
        cases: list[tuple[object, str]] = [
            (None, "not a triple"),
            ([message, signature, key], "not a triple"),
            ((message, signature), "not a triple"),
            ((message.decode(), signature, key), "not all bytes"),
            ((message, None, key), "not all bytes"),
            ((b"x" * (MAX_MESSAGE_BYTES + 1), signature, key), "bytes, and"),
            ((message, b"v1-" + signature[3:], key), "version that is not known"),
            ((message, signature, b"v1-" + key[3:]), "version that is not known"),
            ((message, signature[:-1], key), "103 characters"),
            ((message, signature, b"v0-" + b"1" * 52), "not base32"),
            ((message, b"v0-" + b"\xff" * 103, key), "not base32"),
            ((message + b" ", signature, key), "it was changed"),
            (self.signed(b"["), "not JSON"),
            (self.signed(b"\xff"), "not JSON"),
            (self.signed(b"[" * 20_000), "not JSON"),
            (self.signed(b"[]"), "not a JSON object"),
        ]
        for given, words in cases:
            with self.assertRaises(ValueError) as caught:
                verify(given)
            self.assertIn(words, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))

    def signed(self, message: bytes) -> tuple[bytes, bytes, bytes]:
        """Sign anything."""
        signature = b"v0-" + base32.encode(KEY.sign(message)).encode()
        return message, signature, SIGNED[2]


class BookTests(SynchronousTestCase):
    """What is news."""

    def test_only_greater_sequence_numbers_are_news(self) -> None:
        """Equal and older announcements change nothing; without a number the last one wins."""
        book = AnnouncementRecords()
        self.assertTrue(book.hear(announcement(seqnum=5)))
        for stale in (5, 4, -1, None, "6", True, 5.5):
            self.assertFalse(book.hear(announcement(seqnum=stale, nickname="x")), stale)
        self.assertFalse(book.hear(announcement(seqnum=5)))
        self.assertTrue(book.hear(announcement(seqnum=6, nickname="y")))
        (known,) = book.announcements
        self.assertEqual(known.fields["nickname"], "y")
        book = AnnouncementRecords()
        self.assertTrue(book.hear(announcement(seqnum=None)))
        self.assertFalse(book.hear(announcement(seqnum=None)))
        self.assertTrue(book.hear(announcement(seqnum=None, nickname="z")))

    def test_what_was_remembered_gives_way(self) -> None:
        """A server that was set back to an older number is believed when it speaks for itself."""
        book = AnnouncementRecords()
        self.assertTrue(book.remember(announcement(seqnum=9)))
        self.assertFalse(book.remember(announcement(seqnum=10)))
        self.assertTrue(book.hear(announcement(seqnum=2)))
        self.assertFalse(book.hear(announcement(seqnum=1)))

    def test_other_services_are_passed_over(self) -> None:
        """Only storage servers count."""
        book = AnnouncementRecords()
        for service in ("stub_client", None, 7):
            self.assertFalse(book.hear(verify(sign({**FIELDS, "service-name": service}, KEY))))
        self.assertEqual(len(book), 0)

    def test_only_what_is_looked_at_is_kept(self) -> None:
        """Thousands of servers may be known, so nobody's other fields, names and addresses take much."""
        book = AnnouncementRecords()
        deep: list[Any] = []
        for _ in range(500):
            deep = [deep]
        nurls = FIELDS[NURLS]
        self.assertTrue(
            book.hear(
                announcement(
                    KEY,
                    seqnum=2,
                    others=deep,
                    many=[{}] * 2000,
                    nickname="n" * 1000,
                    **dict[str, Any]({NURLS: [*nurls, {}, *["x"] * 1000]}),
                )
            )
        )
        (known,) = book.announcements
        self.assertLess(len(json.dumps(known.fields)), MAX_KEPT_BYTES)
        self.assertEqual(known.fields["nickname"], "n" * 100)
        self.assertNotIn("others", known.fields)
        much: list[dict[str, Any]] = [
            {NURLS: ["x" * 1000] * 4},
            {FURL: "x" * 4000},
            {"seqnum": 10**4000},
        ]
        for fields in much:
            with self.assertRaisesRegex(ValueError, "its addresses take [0-9]+ bytes"):
                book.hear(announcement(KEY, **fields))
            self.assertFalse(AnnouncementRecords().remember(announcement(KEY, **fields)))
        # What is of the wrong kind stays so, and is refused as before.
        book.hear(announcement(KEY, **dict[str, Any]({"seqnum": 3, FURL: [[]], "nickname": {}})))
        with self.assertRaisesRegex(ValueError, f"its {FURL} is not text"):
            describe(SERVER_ID, book.announcements[0].fields)

    def test_the_number_is_bounded(self) -> None:
        """Strangers cannot fill the memory; those who are known still have news."""
        book = AnnouncementRecords(limit=2)
        keys = [make_signing_key() for _ in range(3)]
        for key in keys[:2]:
            self.assertTrue(book.hear(announcement(key)))
        with self.assertRaises(ValueError):
            book.hear(announcement(keys[2]))
        self.assertFalse(book.remember(announcement(keys[2])))
        self.assertTrue(book.hear(announcement(keys[0], seqnum=2)))


class DescribeTests(SynchronousTestCase):
    """What a client makes of the fields."""

    def test_recorded(self) -> None:
        """Names, seeds and addresses."""
        known = describe(SERVER_ID, FIELDS)
        self.assertEqual(str(known.nurl), FIELDS["anonymous-storage-NURLs"][0])
        self.assertEqual(str(known.furl), FIELDS["anonymous-storage-FURL"])
        self.assertEqual(known.identity.nickname, "n\u00f6de")
        self.assertEqual(known.identity.permutation_seed, KEY.public_bytes)
        self.assertEqual(
            base32.encode(known.identity.lease_seed), FIELDS["anonymous-storage-FURL"][5:37]
        )

    def test_what_later_versions_may_add(self) -> None:
        """Unknown fields and addresses are passed over, as long as a known address is there."""
        later = FIELDS["anonymous-storage-NURLs"][0].replace("#v=1", "#v=2")
        fields = {**FIELDS, "version": 7, "storage-options": [{"name": "x"}], "new": {"a": [1]}}
        fields["anonymous-storage-NURLs"] = [later, *FIELDS["anonymous-storage-NURLs"]]
        self.assertEqual(describe(SERVER_ID, fields).nurl, describe(SERVER_ID, FIELDS).nurl)
        fields["anonymous-storage-NURLs"] = [later]
        known = describe(SERVER_ID, fields)
        self.assertIsNone(known.nurl)
        self.assertIsNotNone(known.furl)
        del fields["anonymous-storage-FURL"]
        with self.assertRaises(ValueError) as caught:
            describe(SERVER_ID, fields)
        self.assertIn("version that is not known", str(caught.exception))

    def test_several_addresses(self) -> None:
        """All NURLs count, each once, also with other keys and secrets; those through Tor come last."""
        (first,) = FIELDS["anonymous-storage-NURLs"]
        known = server_address.parse_nurl(first)
        second = str(attrs.evolve(known, host="10.0.0.7"))
        others = [
            str(attrs.evolve(known, host="a.onion", tor=True)),
            str(attrs.evolve(known, host="b.onion")),
            str(attrs.evolve(known, swissnum="other")),
            str(attrs.evolve(known, spki_hash=b"o" * 32)),
            first,
            "#v=2",
        ]
        fields = {**FIELDS, "anonymous-storage-NURLs": [first, *others, second]}
        found = describe(SERVER_ID, fields)
        self.assertEqual(str(found.nurl), first)
        self.assertEqual(list(map(str, found.other_nurls)), [*others[2:4], second, *others[:2]])
        self.assertEqual(len(found.addresses), 7)

    def test_all_nurls_lead_through_tor(self) -> None:
        """They are kept, with the fURL; the policy for connections decides later."""
        (first,) = FIELDS["anonymous-storage-NURLs"]
        tor = str(attrs.evolve(server_address.parse_nurl(first), host="a.onion", tor=True))
        found = describe(SERVER_ID, {**FIELDS, "anonymous-storage-NURLs": [tor]})
        self.assertEqual(
            (str(found.nurl), str(found.furl)), (tor, FIELDS["anonymous-storage-FURL"])
        )

    def test_bundles(self) -> None:
        """What a server says of bundles is taken if it makes sense, and passed over otherwise."""
        self.assertEqual(describe(SERVER_ID, FIELDS).bundle_bytes, 0)
        for value, expected in (
            (262144, 262144),
            (1, 1),
            (0, 0),
            (-1, 0),
            (True, 0),
            (1 << 40, 0),
            ("262144", 0),
            ([262144], 0),
            (None, 0),
            (1.5, 0),
        ):
            known = describe(SERVER_ID, {**FIELDS, "pipegrid-bundles": value})
            self.assertEqual(known.bundle_bytes, expected, repr(value))

    def test_confused_addresses(self) -> None:
        """A fURL for a NURL, and the reverse, are told apart, without their secrets."""
        a_furl, a_nurl = FIELDS["anonymous-storage-FURL"], FIELDS["anonymous-storage-NURLs"][0]
        for fields, words in (
            ({"anonymous-storage-NURLs": [a_furl]}, "that is a fURL"),
            ({"anonymous-storage-NURLs": [a_furl], "anonymous-storage-FURL": a_furl}, "is a fURL"),
            ({"anonymous-storage-FURL": a_nurl}, "NURL"),
            ({"anonymous-storage-FURL": "pb://x"}, "looks like"),
            ({}, "its address is not known"),
        ):
            with self.assertRaises(Exception) as caught:
                describe("x", fields)
            self.assertIn(words, str(caught.exception))
            self.assertNotIn("swissnum", str(caught.exception))

    def test_nicknames_are_made_printable(self) -> None:
        """A stranger's name cannot command the terminal, or fill it."""
        for given, shown in (
            ("a\x1b[31m\nb", "a?[31m?b"),
            ("", SERVER_ID),
            (" ", SERVER_ID),
            ("x" * 1000, "x" * 100),
        ):
            known = describe(SERVER_ID, {**FIELDS, "nickname": given})
            self.assertEqual(known.identity.nickname, shown)

    def test_any_json_is_described_or_refused(self) -> None:
        """Fields of every wrong type are one sentence, never another exception."""
        values = [None, 7, True, "", "x", [], [None], ["x"], {}, {"a": 1}, 1e300]
        for name in FIELDS:
            for value in values:
                fields = json.loads(json.dumps({**FIELDS, name: value}))
                try:
                    describe(SERVER_ID, fields)
                except Exception as error:
                    self.assertIsInstance(error, ValueError)
                    self.assertNotIn("\n", str(error))


class FurlTests(SynchronousTestCase):
    """fURLs."""

    def test_parse(self) -> None:
        """Text and parts correspond; long tub ids are cut."""
        text = FIELDS["anonymous-storage-FURL"]
        parsed = server_address.parse_furl(text)
        self.assertEqual(str(parsed), text)
        self.assertEqual(parsed.address, "127.0.0.1:39471")
        self.assertEqual(parsed.swissnum, "swissnum")
        self.assertNotIn("swissnum'", repr(parsed))
        self.assertEqual(
            server_address.parse_furl(text.replace("@", "aaaa@")).tub_id, parsed.tub_id
        )
        self.assertEqual(
            server_address.parse_furl(text.replace("tcp:127.0.0.1:39471", "")).address, "nowhere"
        )
        for bad in (
            "",
            "pb://x@y/z",
            text + "/more",
            text + " ",
            "x" + text,
            text[:-9],
            "z" * 9000,
        ):
            with self.assertRaises(Exception) as caught:
                server_address.parse_furl(bad)
            self.assertIn("looks like", str(caught.exception))

    def test_the_other_kind(self) -> None:
        """Each parser names what it was given instead."""
        with self.assertRaises(Exception) as caught:
            server_address.parse_nurl(FIELDS["anonymous-storage-FURL"])
        self.assertIn("that is a fURL", str(caught.exception))
        with self.assertRaises(Exception) as caught:
            server_address.parse_furl(FIELDS["anonymous-storage-NURLs"][0])
        self.assertIn("NURL", str(caught.exception))
