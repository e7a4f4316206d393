"""Banana's tokens, cut from whatever pieces they arrive in."""

from __future__ import annotations

from misc.attack.foolscap import call, string, token, value
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire.banana_receiver import CLOSE, INT, OPEN, PING, STRING, LimitExceeded, Tokens

STREAM = call(1, 1, b"write", value(1 << 30), value(b"data" * 50)) + token(PING, 300) + string(b"")


def tokens_of(pieces: list[bytes]) -> list[tuple[int, int, bytes | None]]:
    """Return all tokens, asking as much as possible after each piece."""
    tokens, found = Tokens(), list[tuple[int, int, bytes | None]]()
    waiting: tuple[int, int] | None = None
    for piece in pieces:
        tokens.feed(piece)
        while True:
            if waiting is None:
                waiting = tokens.header()
                if waiting is None:
                    break
            body = None
            if waiting[0] == STRING:
                body = tokens.body(waiting[1])
                if body is None:
                    break
            found.append((*waiting, body))
            waiting = None
    assert not tokens.waiting_bytes
    assert not tokens.missing_bytes
    return found


class TokensTests(SynchronousTestCase):
    """Each token once, in order, and no more in memory than has come."""

    def test_however_it_is_cut(self) -> None:
        """The pieces make no difference."""
        whole = tokens_of([STREAM])
        self.assertEqual(whole[-2:], [(PING, 300, None), (STRING, 0, b"")])
        self.assertIn((INT, 1 << 30, None), whole)
        self.assertEqual([kind for kind, _, _ in whole].count(OPEN), 2)
        self.assertEqual([kind for kind, _, _ in whole].count(CLOSE), 2)
        for size in (1, 2, 3, 7, 64):
            pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
            self.assertEqual(tokens_of(pieces), whole, f"in pieces of {size}")

    def test_a_body_is_gathered_once(self) -> None:
        """What has not come takes no memory; what has is in one buffer, and what is left is left."""
        tokens = Tokens()
        tokens.feed(token(STRING, 1 << 40, b"begin"))
        self.assertEqual(tokens.header(), (STRING, 1 << 40))
        self.assertIsNone(tokens.body(1 << 40))
        self.assertEqual(tokens.missing_bytes, (1 << 40) - 5)
        self.assertFalse(tokens.feed(b"x" * 1000))
        self.assertEqual(tokens.waiting_bytes, 0)
        self.assertEqual(tokens.missing_bytes, (1 << 40) - 1005)
        tokens.clear()
        self.assertEqual(tokens.missing_bytes, 0)

    def test_skipping(self) -> None:
        """What is skipped is not kept, however it comes."""
        tokens = Tokens()
        tokens.feed(token(STRING, 10, b"abc"))
        self.assertEqual(tokens.header(), (STRING, 10))
        tokens.skip(10)
        self.assertIsNone(tokens.header())
        self.assertFalse(tokens.feed(b"defg"))
        self.assertTrue(tokens.feed(b"hij" + token(PING, 7)))
        self.assertEqual(tokens.header(), (PING, 7))

    def test_a_number_without_end(self) -> None:
        """No number has more than nine bytes."""
        tokens = Tokens()
        tokens.feed(b"\x7f" * 9 + bytes((INT,)))
        self.assertEqual(tokens.header(), (INT, (1 << 63) - 1))
        tokens.feed(b"\x00" * 10)
        with self.assertRaises(LimitExceeded):
            tokens.header()
