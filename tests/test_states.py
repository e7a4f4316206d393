"""Tables of states and events."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.state_table import Named, NotInTable, Table


class Door(Named):
    """A door can be"""

    OPEN = "is open"
    SHUT = "is shut"
    BURNT = "is burnt"


class Deed(Named):
    """and one can"""

    PUSH = "it is pushed"
    FIRE = "there is a fire"


TABLE: Table[Door, Deed] = Table(
    "a door",
    tuple(Deed),
    {
        Door.OPEN: (Door.SHUT, Door.BURNT),
        Door.SHUT: (Door.OPEN, Door.BURNT),
        Door.BURNT: (None, None),
    },
)


class TableTests(SynchronousTestCase):
    """A table of states and events."""

    def test_what_becomes_of_what(self) -> None:
        """It is looked up by line and column."""
        self.assertIs(TABLE.after(Door.OPEN, Deed.PUSH), Door.SHUT)
        self.assertIs(TABLE.after(Door.SHUT, Deed.FIRE), Door.BURNT)
        self.assertEqual(TABLE.states, tuple(Door))
        self.assertTrue(TABLE.allows(Door.OPEN, Deed.PUSH))
        self.assertFalse(TABLE.allows(Door.BURNT, Deed.PUSH))

    def test_what_is_not_in_it_cannot_happen(self) -> None:
        """And is refused in a sentence."""
        error = self.assertRaises(NotInTable, TABLE.after, Door.BURNT, Deed.PUSH)
        self.assertEqual(str(error), "a door that is burnt cannot have that it is pushed")

    def test_a_line_that_is_too_short(self) -> None:
        """Every event has its column in every line."""
        self.assertRaises(ValueError, Table, "a door", tuple(Deed), {Door.OPEN: (None,)})
