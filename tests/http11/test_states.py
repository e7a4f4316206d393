"""What a connection can be, and that it is nothing else: the tables, and walks through what they allow."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.error import ConnectionLost
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.connection_states_timeouts import (
    LIFE,
    READER,
    LifeEvent,
    Phase,
    ReaderState,
    Reading,
)
from pipegrid.http11.exchange import RawExchange, RawRequest, RequestNotSent, ResponseError
from pipegrid.http11.request_sender import PIECE_BYTES
from pipegrid.state_table import NotInTable
from tests.http11.wire import ConnectionFixture, get, ok


class TableTests(SynchronousTestCase):
    """The tables themselves."""

    def test_every_state_is_in_them(self) -> None:
        """And can be come to."""
        for table, states in ((LIFE, Phase), (READER, ReaderState)):
            table_: Any = table
            self.assertEqual(table_.states, tuple(states))
            reached = {table_.states[0]}
            for _ in states:
                reached |= {
                    table_.after(state, event)
                    for state in reached
                    for event in table_.events
                    if table_.allows(state, event)
                }
            self.assertEqual(reached, set(states))

    def test_nothing_leads_back(self) -> None:
        """A connection that takes no more requests never takes any again, and what is gone stays gone."""
        order = list(Phase)
        for phase in Phase:
            for happening in LifeEvent:
                if LIFE.allows(phase, happening):
                    self.assertGreaterEqual(
                        order.index(LIFE.after(phase, happening)), order.index(phase)
                    )

    def test_every_way_of_being_paused_ends(self) -> None:
        """By the reader's going on."""
        for reader in ReaderState:
            if reader is not ReaderState.READS:
                self.assertIs(READER.after(reader, Reading.GOES_ON), ReaderState.READS)


class RefusedTests(SynchronousTestCase):
    """What the table does not have."""

    def test_lost_twice(self) -> None:
        """A transport that is gone cannot be lost."""
        fixture = ConnectionFixture()
        fixture.wire.lose()
        self.assertRaises(NotInTable, fixture.wire.lose)

    def test_a_late_handshake(self) -> None:
        """One that is over when the connection has been given up is no news."""
        fixture = ConnectionFixture()
        fixture.connection.abort()
        fixture.connection.handshakeCompleted()
        fixture.connection._check_invariants()
        self.assertFalse(fixture.connection.open)

    def test_closed_by_who_hears_of_the_last_answer(self) -> None:
        """While last words are heard, requests are refused, and closing changes nothing."""
        fixture = ConnectionFixture()
        first = fixture.connection.request(get("/1"))
        late = []

        def answered(result: object) -> object:
            late.append(fixture.connection.request(get("/2")))
            fixture.connection.close()
            return result

        first.addCallback(answered)
        fixture.turn()
        fixture.receive(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        fixture.wire.lose()
        self.assertEqual(self.successResultOf(first).body, b"all of it")
        self.failureResultOf(late[0], RequestNotSent)
        fixture.connection._check_invariants()

    def test_a_reader_that_paused_before_its_request_was_written(self) -> None:
        """It holds up others, and is no silence of the server's."""
        fixture = ConnectionFixture(Limits(blocked_after_s=1))
        exchange = _Asked(RawRequest(b"GET / HTTP/1.1\r\n\r\n"), "server")
        fixture.connection.submit(exchange)
        exchange.paused = True
        fixture.connection.pause_changed(exchange)
        fixture.turn()
        fixture.clock.advance(2)
        self.assertTrue(fixture.connection.open)
        self.assertTrue(fixture.connection.blocked)
        fixture.connection._check_invariants()

    def test_ended_by_who_hears_that_a_body_is_broken_off(self) -> None:
        """The connection is given up by the very request that is taken back half sent: that is all."""
        fixture = ConnectionFixture()
        connection = fixture.connection

        class GivesUp(_Asked):
            def gave_up(self, error: object) -> None:
                connection.abort()

        exchange = GivesUp(
            RawRequest(b"PUT / HTTP/1.1\r\n\r\n", [bytes(3 * PIECE_BYTES)]), "server"
        )
        write = fixture.wire.writeSequence

        def write_and_be_full(pieces: Any) -> None:
            write(pieces)
            fixture.wire.send_valve.pauseProducing()

        self.patch(fixture.wire, "writeSequence", write_and_be_full)
        connection.submit(exchange)
        fixture.turn()
        self.assertFalse(exchange.sent)
        self.assertEqual(len(connection.lane.written), 1)
        connection.cancel(exchange, ResponseError("enough", "server"))
        connection._check_invariants()
        self.assertFalse(connection.open)


class _Asked(RawExchange):
    """A request whose reader can pause."""

    def answered(self, answer: object) -> None:
        """It is."""

    def gave_up(self, error: object) -> None:
        """It will not be."""


_CALLS = ("ask", "ask long", "turn", "cancel", "pause", "go on", "wait", "close", "abort")
_TRANSPORTS = ("answer", "half", "full", "room", "lose", "break")
_STEPS = st.lists(
    st.tuples(
        st.sampled_from([*_CALLS, *_TRANSPORTS]),
        st.integers(0, 9),
    ),
    max_size=40,
)


class WalkTests(SynchronousTestCase):
    """Whatever happens, in whatever order."""

    @settings(max_examples=150, deadline=None)
    @given(_STEPS)
    def test_invariants(self, steps: list[tuple[str, int]]) -> None:
        """The connection is what the table says, and never meets what the table does not have."""
        fixture = ConnectionFixture(Limits(blocked_after_s=1, slow_reader_after_s=2))
        connection, lane = fixture.connection, fixture.connection.lane
        asked: list[_Asked] = []
        gone = False
        for step, number in steps:
            each = asked[number % len(asked)] if asked else None
            if step in ("ask", "ask long"):
                body = [b"x" * (3 * PIECE_BYTES)] if step == "ask long" else []
                request = RawRequest(b"PUT / HTTP/1.1\r\nHost: h\r\n\r\n", body)
                asked.append(_Asked(request, "server"))
                connection.submit(asked[-1])
            elif step in ("answer", "half") and lane.written and not gone:
                answer = ok(b"0123456789")
                if lane.written[0].response is not None:
                    answer = answer[-5:]
                elif step == "half":
                    answer = answer[:-5]
                connection.dataReceived(answer)
            elif step == "cancel" and each is not None:
                connection.cancel(each)
            elif step in ("pause", "go on") and each is not None and each.connection is connection:
                each.paused = step == "pause"
                connection.pause_changed(each)
            elif step in ("full", "room") and fixture.wire.producer is not None and not gone:
                valve = fixture.wire.send_valve
                (valve.pauseProducing if step == "full" else valve.resumeProducing)()
            elif step == "wait":
                fixture.clock.advance(number)
            elif step == "close":
                connection.close()
            elif step == "abort":
                connection.abort()
            elif step in ("lose", "break") and not gone:
                gone = True
                fixture.wire.lose(ConnectionLost() if step == "break" else None)
            fixture.clock.advance(0)
            connection._check_invariants()
        connection.abort()
        connection._check_invariants()
        self.assertEqual(len(lane), 0)
