"""Errors are values, too: they go to other processes, and come back as they were."""

from __future__ import annotations

import copy
import pickle

from twisted.trial.unittest import SynchronousTestCase

from pipegrid import errors
from pipegrid.errors import (
    ChildExists,
    CorruptionError,
    NoSpace,
    NoSuchChild,
    NotEnoughSharesError,
    PipegridError,
    RemoteCallError,
    RollbackError,
    SegmentTooLarge,
    ServerTimeout,
    UncoordinatedWriteError,
    UnhappyError,
    UsageError,
)

MADE = (
    UsageError("a"),
    RemoteCallError("a", "b", "c"),
    SegmentTooLarge(1 << 25, 1 << 20),
    NoSuchChild("a", "b"),
    ChildExists("a", "b"),
    UnhappyError("a", 1, 2),
    NotEnoughSharesError("a", 1, 2),
    UncoordinatedWriteError("a", 1, 2),
    RollbackError("a", 1, 2),
    ServerTimeout("a", "b", True),
    NoSpace("a", "b"),
    CorruptionError("a", 1, 2, "b"),
)


class ErrorsTests(SynchronousTestCase):
    """All kinds that take more than a text."""

    def test_they_can_be_made_again(self) -> None:
        """With their text and facts; a pool of processes waited for ever for one that could not."""
        for error in MADE:
            for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
                self.assertIs(type(again), type(error))
                self.assertEqual((str(again), again.args), (str(error), error.args))
                self.assertEqual(vars(again), vars(error))

    def test_all_kinds(self) -> None:
        """None that asks for more than a text is left out above."""
        tried = {type(error) for error in MADE}
        kinds = [each for each in vars(errors).values() if isinstance(each, type)]
        for kind in kinds:
            if issubclass(kind, PipegridError) and "__init__" in vars(kind):
                self.assertTrue(any(issubclass(each, kind) for each in tried), kind)
