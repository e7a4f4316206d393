"""What a client's connection can be, and that it is nothing else."""

from __future__ import annotations

from typing import Any

from pipegrid.server.gbs.request_order import (
    LIFE,
    TURN,
    ConnectionLife,
    ServerEvent,
    TurnEvent,
    TurnState,
    TurnTaking,
)
from pipegrid.state_table import NotInTable
from tests.server.gbs.support import VERSION, ServerTestCase, parse_replies


class _Turns:
    """Lets whoever wants a turn have it, if the test says so; remembers who waits, and whose turn ended."""

    def __init__(self) -> None:
        self.over = False
        self.free = True
        self.log: list[str] = []

    def may_have(self, member: object) -> bool:
        """As the test says."""
        return self.free

    def wait(self, member: object) -> None:
        """In line."""
        self.log.append("waits")

    def end(self, member: object) -> None:
        """Account is kept."""
        self.log.append("ended")


class StatesTests(ServerTestCase):
    """The tables, and the connection that lives by them."""

    def test_every_state_is_in_them(self) -> None:
        """And can be come to."""
        for table, states in ((LIFE, ConnectionLife), (TURN, TurnState)):
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
        """Who drains does not begin anything any more, and who has gone does not come back."""
        order = list(ConnectionLife)
        for life in ConnectionLife:
            for happening in ServerEvent:
                if LIFE.allows(life, happening):
                    self.assertGreaterEqual(
                        order.index(LIFE.after(life, happening)), order.index(life)
                    )

    def test_a_life(self) -> None:
        """It is open, drains with a last request, closes behind the answer, and is gone."""
        connection, transport = self.connect()
        order = connection._order
        self.assertIs(order.life, ConnectionLife.OPEN)
        connection.dataReceived(VERSION)
        self.assertIs(order.life, ConnectionLife.OPEN)
        connection.dataReceived(VERSION.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        self.assertEqual(len(parse_replies(transport.written)), 2)
        self.assertIs(order.life, ConnectionLife.CLOSING)
        connection.drain()  # the server stops meanwhile
        self.assertIs(order.life, ConnectionLife.CLOSING)
        connection._check_invariants()
        transport.lose()
        self.assertIs(order.life, ConnectionLife.GONE)
        connection._check_invariants()
        self.assertRaises(NotInTable, order.move, ServerEvent.CLOSES)

    def test_garbage_drains(self) -> None:
        """What is no HTTP is answered behind what came before it, and ends the connection."""
        connection, transport = self.connect()
        connection.dataReceived(VERSION + b"nonsense\r\n\r\n")
        self.assertEqual([each.status for each in parse_replies(transport.written)], [200, 400])
        self.assertIs(connection._order.life, ConnectionLife.CLOSING)
        connection._check_invariants()

    def test_turns(self) -> None:
        """A turn is had until it is over, and the next one waited for, once."""
        turns: Any = _Turns()
        turn = TurnTaking(turns, self)
        self.assertTrue(turn.may_go_on())
        self.assertIs(turn.state, TurnState.HAS)
        turns.over = True
        self.assertFalse(turn.may_go_on())
        self.assertFalse(turn.may_go_on())
        turn.wait_in_queue()
        self.assertIs(turn.state, TurnState.WAITS_AGAIN)
        turn.is_over()
        self.assertIs(turn.state, TurnState.WAITS)
        self.assertFalse(turn.may_go_on())
        turn.is_over()  # which it had not
        turns.over = False
        turn.is_given()
        self.assertTrue(turn.may_go_on())
        turn.is_over()
        self.assertIs(turn.state, TurnState.NOT_WANTED)
        self.assertEqual(turns.log, ["waits", "ended", "ended"])
        self.assertRaises(NotInTable, turn._move, TurnEvent.IS_OVER)

    def test_a_turn_that_others_have(self) -> None:
        """It is waited for."""
        turns: Any = _Turns()
        turns.free = False
        turn = TurnTaking(turns, self)
        self.assertFalse(turn.may_go_on())
        self.assertIs(turn.state, TurnState.WAITS)
        self.assertEqual(turns.log, ["waits"])
