"""The responder's protocol: who knows the token is served within the limits, everybody else gets nothing."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.speedtest.responder_protocol import (
    HELLO,
    LINE_BYTES,
    REFUSALS,
    ByteAllowance,
    LineReader,
    ServerSession,
    nonce_of,
    proof,
    refusal_of,
)

TOKEN = "correct-horse-battery"
NONCE = "ab" * 32


def make_session(limit_bytes: int = 1000) -> ServerSession:
    """Return a session whose nonce is known."""
    return ServerSession(TOKEN, ByteAllowance(limit_bytes), lambda: NONCE)


def say(session: ServerSession, data: bytes) -> bytes:
    """Return what the session answers."""
    session.receive(memoryview(data))
    return session.output()


def introduce(session: ServerSession) -> None:
    """Prove the token."""
    assert say(session, HELLO + b"\n") == f"NONCE {NONCE}\n".encode()
    assert say(session, b"PROOF " + proof(TOKEN, NONCE.encode()) + b"\n") == b"READY\n"


class ServerSessionTests(SynchronousTestCase):
    """The server's side."""

    def setUp(self) -> None:
        self.session = make_session()

    def test_the_proof_is_what_the_documentation_says(self) -> None:
        """HMAC-SHA256 of the digits; the value is what ``openssl dgst -sha256 -hmac`` says."""
        known = b"963a46ece0f3b8c20ba18d9cb1aac399da1983d6366ba44586088e40151da3e1"
        self.assertEqual(proof(TOKEN, NONCE.encode()), known)

    def test_ping(self) -> None:
        """A word comes back."""
        introduce(self.session)
        self.assertEqual(say(self.session, b"PING abc123\n"), b"PONG abc123\n")

    def test_taking(self) -> None:
        """All bytes are counted, and acknowledged with the last one, not before."""
        introduce(self.session)
        self.assertEqual(say(self.session, b"TAKE 10\n"), b"GO\n")
        self.assertEqual(say(self.session, b"123456789"), b"")
        self.assertEqual(say(self.session, b"\n"), b"TAKEN 10\n")
        self.assertEqual(say(self.session, b"PING x\n"), b"PONG x\n")

    def test_giving(self) -> None:
        """So many are given, and then there is room for the next request."""
        introduce(self.session)
        self.assertEqual(say(self.session, b"GIVE 10\n"), b"GO\n")
        self.assertEqual(self.session.give_bytes, 10)
        self.session.gave(4)
        self.session.gave(6)
        self.assertEqual(self.session.give_bytes, 0)
        self.assertEqual(say(self.session, b"PING x\n"), b"PONG x\n")

    def test_a_wrong_proof(self) -> None:
        """Is refused, and that is the end."""
        say(self.session, HELLO + b"\n")
        wrong = proof("another-token", NONCE.encode())
        self.assertEqual(say(self.session, b"PROOF " + wrong + b"\n"), b"REFUSED token\n")
        self.assertTrue(self.session.over)
        self.assertFalse(self.session.proved)
        right = proof(TOKEN, NONCE.encode())
        self.assertEqual(say(self.session, b"PROOF " + right + b"\n"), b"")

    def test_a_proof_of_another_connection_is_worth_nothing(self) -> None:
        """Each has a nonce of its own."""
        one, other = (ServerSession(TOKEN, ByteAllowance(1)) for _ in range(2))
        nonce = nonce_of(say(one, HELLO + b"\n").strip())
        assert nonce is not None
        say(other, HELLO + b"\n")
        answer = say(other, b"PROOF " + proof(TOKEN, nonce) + b"\n")
        self.assertEqual(answer, b"REFUSED token\n")

    def test_nothing_without_proof(self) -> None:
        """Neither pings nor bytes, before or instead of it."""
        for early in (b"PING x\n", b"GIVE 10\n", b"TAKE 10\n", b"READY\n"):
            session = make_session()
            self.assertEqual(say(session, early), b"", early)
            self.assertTrue(session.over, early)
            session = make_session()
            say(session, HELLO + b"\n")
            self.assertEqual(say(session, early), b"REFUSED protocol\n", early)
            self.assertTrue(session.over, early)
            self.assertEqual(session.give_bytes, 0)

    def test_the_limit_is_one_for_all_connections(self) -> None:
        """What is asked for counts, in both directions, whoever asks."""
        allowance = ByteAllowance(100)
        one, other = (ServerSession(TOKEN, allowance, lambda: NONCE) for _ in range(2))
        for session in (one, other):
            introduce(session)
        self.assertEqual(say(one, b"GIVE 60\n"), b"GO\n")
        self.assertEqual(say(other, b"TAKE 41\n"), b"REFUSED bytes\n")
        self.assertTrue(other.over)
        third = ServerSession(TOKEN, allowance, lambda: NONCE)
        introduce(third)
        self.assertEqual(say(third, b"TAKE 40\n"), b"GO\n")
        self.assertEqual(allowance.left_bytes, 0)

    def test_what_is_no_request_is_refused(self) -> None:
        """Signs, zeros, other words, no line at all."""
        for wrong in (
            b"GIVE 0\n",
            b"GIVE -1\n",
            b"GIVE +1\n",
            b"GIVE 01\n",
            b"GIVE 1e3\n",
            b"GIVE  1\n",
            b"GIVE 1 \n",
            b"GIVE 1\r\n",
            b"GIVE " + b"9" * 19 + b"\n",
            b"give 1\n",
            b"PING \n",
            b"PING a b\n",
            b"PING " + b"a" * 33 + b"\n",
            b"\n",
            b"\0" * LINE_BYTES,
            b"PING \xff\n",
            b"GIVE \xd9\xa3\n",
        ):
            session = make_session()
            introduce(session)
            self.assertEqual(say(session, wrong), b"REFUSED protocol\n", wrong)
            self.assertTrue(session.over, wrong)

    def test_one_thing_after_the_other(self) -> None:
        """A request behind a GIVE would have to be kept; nobody needs that."""
        introduce(self.session)
        self.assertEqual(say(self.session, b"GIVE 10\nPING x\n"), b"GO\nREFUSED protocol\n")
        self.assertEqual(self.session.give_bytes, 0)

    def test_a_refusal_ends_what_was_under_way(self) -> None:
        """And is said once."""
        introduce(self.session)
        say(self.session, b"TAKE 10\n12345")
        self.session.refuse("time")
        self.session.refuse("time")
        self.assertEqual(self.session.output(), b"REFUSED time\n")
        self.assertEqual(say(self.session, b"67890"), b"")

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.lists(st.integers(1, 40), max_size=60), st.integers(0, 2**32))
    def test_any_split_gives_the_same(self, cuts: list[int], seed: int) -> None:
        """However the bytes come, the answers are the same."""
        rng = random.Random(seed)
        talk = b"PING a\nTAKE 300\n" + rng.randbytes(300) + b"PING b\nTAKE 1\n\nGIVE 7\n"
        whole, split = make_session(), make_session()
        for session in (whole, split):
            introduce(session)
        expected = say(whole, talk)
        answer, at = b"", 0
        for cut in [*cuts, len(talk)]:
            answer += say(split, talk[at : at + cut])
            at += cut
        self.assertEqual(answer, expected)
        self.assertEqual((split.give_bytes, split.over), (7, False))

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(
        st.lists(
            st.one_of(
                st.binary(max_size=300),
                st.sampled_from(
                    [HELLO + b"\n", b"PROOF ", b"GIVE 9\n", b"TAKE 9\n", b"PING x\n", b"\n"]
                ),
            ),
            max_size=12,
        )
    )
    def test_strangers_get_two_lines_at_most(self, pieces: list[bytes]) -> None:
        """Whatever they send: a nonce and a refusal, no bytes, no place to leave theirs."""
        session = make_session()
        answer = b"".join(say(session, piece) for piece in pieces)
        self.assertLessEqual(answer.count(b"\n"), 2, answer)
        self.assertLess(len(answer), 100)
        self.assertFalse(session.proved)
        self.assertEqual(session.give_bytes, 0)
        self.assertLessEqual(len(session._lines._buffer), LINE_BYTES)

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(
        st.lists(
            st.one_of(
                st.binary(max_size=60),
                st.builds(lambda size: b"TAKE %d\n" % size, st.integers(-1, 2000)),
                st.builds(lambda size: b"GIVE %d\n" % size, st.integers(-1, 2000)),
                st.sampled_from([b"PING x\n", b"\n"]),
            ),
            max_size=12,
        )
    )
    def test_the_limit_holds_whatever_is_asked(self, pieces: list[bytes]) -> None:
        """Nobody is given more than is left."""
        allowance = ByteAllowance(1000)
        session = ServerSession(TOKEN, allowance, lambda: NONCE)
        introduce(session)
        given_bytes = 0
        for piece in pieces:
            say(session, piece)
            given_bytes += session.give_bytes
            session.gave(session.give_bytes)
        self.assertLessEqual(given_bytes, 1000 - allowance.left_bytes)
        self.assertGreaterEqual(allowance.left_bytes, 0)


class ClientLinesTests(SynchronousTestCase):
    """What a client reads."""

    def test_refusals_are_sentences(self) -> None:
        """Those that are known and those that are not; other lines are none."""
        for reason, words in REFUSALS.items():
            self.assertEqual(refusal_of(b"REFUSED " + reason.encode()), words)
        self.assertIn("does not know", refusal_of(b"REFUSED weather") or "")
        self.assertIsNone(refusal_of(b"REFUSED"))
        self.assertIsNone(refusal_of(b"HTTP/1.1 400 Bad Request"))

    def test_nonces(self) -> None:
        """Only such lines hold one."""
        self.assertEqual(nonce_of(b"NONCE " + b"0" * 64), b"0" * 64)
        for line in (b"NONCE 12", b"NONCE " + b"G" * 64, b"", b"SSH-2.0-OpenSSH_9.6"):
            self.assertIsNone(nonce_of(line), line)

    def test_a_line_that_does_not_end_is_none(self) -> None:
        """It does not stay in memory."""
        line, rest = LineReader().next(memoryview(b"x" * 10_000))
        self.assertEqual((line, len(rest)), (b"", 0))
