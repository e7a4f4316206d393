"""
Two clients change the same names of two directories at the same time, at random, against a model.

A round is two to four operations that begin within two round trips, some of one client at the same moment:
links, renames, changes of several names, and moves from one directory to the other. There must be an order
of their steps, each of which is one change or one look at a directory, that gives what each of them was
told, and what is there afterwards: what was acknowledged is not lost, nothing comes from nowhere, and
metadata go where their names go. Of two versions with one number only one can be read, so none is merged,
and what is taken out stays out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import attrs
from twisted.internet.defer import Deferred, DeferredList, succeed
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import DirectoryCap, LitCap
from pipegrid.core.mutable.directory_content_edits import Edit, Link, Rename, SetMetadata, Unlink
from pipegrid.core.mutable.keys import SigningKey
from pipegrid.errors import ChildExists, NoSuchChild, UsageError
from pipegrid.transfer.mutable.mutable_files import MutableFiles
from pipegrid.tree.directory import Directory, move
from tests.core.mutable.support import key
from tests.transfer.mutable_world import KeysAtOnce, MutableWorld
from tests.transfer.world import RTT

SEEDS = (*range(4), 133)
"""In the last a link is half stored, and replaced by somebody else before its writer tries it again."""

ROUNDS = 15
NAMES = ("a", "b", "c")

Names = tuple[tuple[str, str, str], ...]
"""Of one directory: name, cap, and metadata without times, in order of names."""

State = tuple[Names, Names]
Step = Callable[[State], "Iterator[tuple[State, Steps]]"]
"""From a state to those that may follow it, with the steps that are left of the operation then."""

Steps = tuple[Step, ...]


class Files:
    """What a directory needs of a grid."""

    def __init__(self, files: MutableFiles) -> None:
        self._files = files

    def modify(self, cap: Any, function: Any, *, merge: Any = None, redo: Any = None) -> Any:
        """Apply a function to a directory's content."""
        return self._files.modify(cap.file, function, merge, redo)

    def read(self, cap: Any, start: int = 0, length: int | None = None) -> Deferred[bytes]:
        """Return the content of a directory."""
        pieces: list[Any] = []
        reading = Deferred.fromCoroutine(
            self._files.read(cap, pieces.extend, lambda size: (start, length))
        )
        return reading.addCallback(lambda _: b"".join(pieces))


def edited(names: Names, edits: Sequence[Edit], repeated: bool) -> Names | type[Exception]:
    """Return what edits make of a directory, or what they fail with."""
    there = {name: (cap, metadata) for name, cap, metadata in names}
    for number, edit in enumerate(edits):
        assert not isinstance(edit, SetMetadata)  # the examples have none
        if isinstance(edit, Link):
            old_cap, metadata = there.get(edit.name, ("", "{}"))
            if old_cap and not edit.replace and not (repeated and old_cap == str(edit.cap)):
                return ChildExists
            if edit.metadata is not None:
                metadata = json.dumps(edit.metadata)
            there[edit.name] = (str(edit.cap), metadata)
        elif isinstance(edit, Unlink):
            if there.pop(edit.name, None) is None and edit.must_exist and not repeated:
                return NoSuchChild
        elif edit.old not in there:
            later = {
                getattr(each, "old", getattr(each, "name", "")) for each in edits[number + 1 :]
            }
            if not (repeated and (edit.new in there or edit.new in later)):
                return NoSuchChild
        elif edit.new in there and not edit.replace:
            if not (repeated and there[edit.new][0] == there[edit.old][0]):
                return ChildExists
            there[edit.new] = there.pop(edit.old)
        else:
            there[edit.new] = there.pop(edit.old)
    return tuple(sorted((name, *rest) for name, rest in there.items()))


def with_names(state: State, which: int, names: Names) -> State:
    """Return a state in which one directory has these names."""
    return (names, state[1]) if which == 0 else (state[0], names)


def child(state: State, which: int, name: str) -> tuple[str, str] | None:
    """Return cap and metadata of a name, or None."""
    return next((tuple(rest) for each, *rest in state[which] if each == name), None)  # type: ignore[return-value]


@attrs.define
class Operation:
    """
    One operation of one client.

    Attributes:
        what: shown where it fails.
        run: begins it.
        outcome: None if it was acknowledged, or the kind of its error.
        perhaps_made: of an error, that the change may have been made before, and others have written since.
    """

    what: str
    run: Callable[[], Any]
    outcome: type[BaseException] | None = None
    perhaps_made: bool = attrs.field(default=False, init=False)

    def steps(self) -> Steps:
        """Return its first step, in which its outcome is known."""
        raise NotImplementedError


@attrs.define
class ChangeNames(Operation):
    """Edits of one directory, in one change."""

    which: int = 0
    edits: Sequence[Edit] = ()

    def steps(self) -> Steps:
        """See ``Operation``: one step."""
        return (self._change,)

    def _change(self, state: State) -> Iterator[tuple[State, Steps]]:
        for repeated in (False, True):
            made = edited(state[self.which], self.edits, repeated)
            if isinstance(made, type):
                if made is self.outcome:
                    yield state, ()
            elif self.outcome is None or self.perhaps_made:
                yield with_names(state, self.which, made), ()


@attrs.define
class MoveName(Operation):
    """A move into the other directory."""

    which: int = 0
    name: str = ""
    new_name: str = ""
    replace: bool = False

    def steps(self) -> Steps:
        """See ``Operation``: look, link there, take out here."""
        return (self._look,)

    def _look(self, state: State) -> Iterator[tuple[State, Steps]]:
        found = child(state, self.which, self.name)
        if found is not None:
            yield state, (partial(self._link, found),)
        elif self.outcome is NoSuchChild:
            yield state, ()

    def _link(self, found: tuple[str, str], state: State) -> Iterator[tuple[State, Steps]]:
        cap, metadata = found
        link = Link(self.new_name, LitCap(cap_bytes(cap)), None, json.loads(metadata), self.replace)
        for repeated in (False, True):
            made = edited(state[1 - self.which], [link], repeated)
            if made is ChildExists:
                yield state, (partial(self._look_there, found),)
            elif not isinstance(made, type):
                after = with_names(state, 1 - self.which, made)
                yield after, (partial(self._take_out, found),)
                if self.perhaps_made:
                    yield after, ()

    def _look_there(self, found: tuple[str, str], state: State) -> Iterator[tuple[State, Steps]]:
        there = child(state, 1 - self.which, self.new_name)
        if there is not None and there[0] == found[0]:
            yield state, (partial(self._take_out, found),)
        elif self.outcome is ChildExists:
            yield state, ()

    def _take_out(self, found: tuple[str, str], state: State) -> Iterator[tuple[State, Steps]]:
        there = child(state, self.which, self.name)
        if there is None and self.outcome is UsageError:
            yield state, ()  # it was said that somebody else had taken it out
        elif there is not None and there[0] != found[0]:
            if self.outcome is UsageError:
                yield state, ()
        elif self.outcome is None:
            left = tuple(each for each in state[self.which] if each[0] != self.name)
            yield with_names(state, self.which, left), ()


def cap_bytes(cap: str) -> bytes:
    """Return what a cap holds that was made here."""
    return CAPS[cap]


CAPS: dict[str, bytes] = {}


def is_possible(state: State, in_flight: Sequence[Steps], after: State) -> bool:
    """Say whether steps, in some order, lead from one state to another."""
    seen = set()

    def search(state: State, in_flight: tuple[Steps, ...]) -> bool:
        if not any(in_flight):
            return state == after
        mark = (state, tuple(map(_mark, in_flight)))
        if mark in seen:
            return False
        seen.add(mark)
        for number, steps in enumerate(in_flight):
            for step in steps:
                for following, left in step(state):
                    if search(following, (*in_flight[:number], left, *in_flight[number + 1 :])):
                        return True
        return False

    return search(state, tuple(in_flight))


def _mark(steps: Steps) -> Any:
    return tuple(
        (each.func.__name__, each.args) if isinstance(each, partial) else each for each in steps
    )


class RecordedKeys(KeysAtOnce):
    """Gives the keys that vectors have, so that a seed is one history."""

    def take(self) -> Deferred[SigningKey]:
        """Give the next."""
        self.taken += 1
        return succeed(key(self.taken))


class World:
    """Two directories, and two clients that change them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = MutableWorld(5, 3, 5, happy=4)
        self.world.keys = RecordedKeys()
        caps = [DirectoryCap(self.world.create(b"")) for _ in range(2)]
        self.clients = [self.directories(caps) for _ in range(2)]
        self.reader = lambda: self.directories(caps)
        self.made = 0

    def directories(self, caps: Sequence[DirectoryCap]) -> list[Directory]:
        """Return both, for a client that knows nothing yet."""
        grid: Any = Files(self.world.client())
        return [Directory(grid, cap, self.world.clock.seconds) for cap in caps]

    def state(self) -> State:
        """Return what somebody sees who knows nothing."""
        found = []
        for directory in self.reader():
            children = self.world.run(directory.list()).values()
            found.append(tuple((each.name, str(each.cap), _metadata(each)) for each in children))
        return found[0], found[1]

    def operation(self, directories: Sequence[Directory]) -> Operation:
        """Return some operation of a client."""
        random = self.random
        which = random.randrange(2)
        here, there = directories[which], directories[1 - which]
        name, other = random.choice(NAMES), random.choice(NAMES)
        flag = random.random() < 0.5
        if random.random() < 0.4:
            what = f"move {name} from {which} to {other}, {flag}"
            run = partial(move, here, name, there, other, flag)
            return MoveName(what, run, None, which, name, other, flag)
        edits = [self.edit() for _ in range(random.choice((1, 1, 2, 3)))]
        return ChangeNames(
            f"change {which}: {edits}", partial(here.change, edits), None, which, edits
        )

    def edit(self) -> Edit:
        """Return some edit."""
        random = self.random
        name, other = random.sample(NAMES, 2)
        flag = random.random() < 0.5
        kind = random.randrange(4)
        if kind == 0:
            return Unlink(name, flag)
        if kind == 1:
            return Rename(name, other, flag)
        self.made += 1
        cap = LitCap(b"%d" % self.made)
        CAPS[str(cap)] = b"%d" % self.made
        return Link(name, cap, None, random.choice((None, {}, {"made": self.made})), flag)

    def round(self, before: State) -> State:
        """Let some operations happen at once; return what is there then."""
        random, operations, moments = self.random, [], list[float]()
        client = self.clients[0]
        for _ in range(random.choice((2, 2, 3, 4))):
            if not moments or random.random() < 0.6:
                client = random.choice(self.clients)
                moments.append(random.random() * 2 * RTT)
            else:  # what one client does at the same moment is joined
                moments.append(moments[-1])
            operations.append(self.operation(client))
        left = len(operations)

        def begin(operation: Operation) -> None:
            begun = operation.run()
            waiting = begun if isinstance(begun, Deferred) else Deferred.fromCoroutine(begun)
            waiting.addBoth(partial(ended, operation))

        def ended(operation: Operation, result: Any) -> None:
            nonlocal left
            left -= 1
            if isinstance(result, Failure):
                operation.outcome = result.type
                operation.perhaps_made = getattr(result.value, "perhaps_made", False)

        for moment, operation in zip(moments, operations, strict=True):
            self.world.clock.callLater(moment, begin, operation)
        self.world.run_until(lambda: left == 0)
        after = self.state()
        if not is_possible(before, [each.steps() for each in operations], after):
            told = "\n".join(f"  {each.what}: {each.outcome}" for each in operations)
            raise AssertionError(f"from {before}\n{told}\nto {after}")
        return after


def _metadata(each: Any) -> str:
    return json.dumps({key: value for key, value in each.metadata.items() if key != "tahoe"})


class TwoDirectoriesTests(SynchronousTestCase):
    """Whoever else changes the same names, each operation is made at some moment, or says why not."""

    def test_random_operations(self) -> None:
        """Each round is explained by some order of what was done in it."""
        for seed in SEEDS:
            self.attempt(seed, ROUNDS)

    def test_a_change_that_fails_with_what_it_made(self) -> None:
        """What others have taken out is said to be gone, also where a write was tried first."""
        world = World(0)
        run = world.world.run
        mine, theirs = (directories[0] for directories in world.clients)
        run(mine.link("next", LitCap(b"1")))
        run(theirs.unlink("next"))
        turn = Link("new", LitCap(b"2")), Unlink("current", False), Rename("next", "current")
        with self.assertRaises(NoSuchChild):
            run(mine.change(turn))
        self.assertEqual(world.state(), ((), ()))

    def test_joined_with_others(self) -> None:
        """The same where other changes are written with it, which are made."""
        world = World(0)
        run = world.world.run
        mine, theirs = (directories[0] for directories in world.clients)
        run(mine.link("next", LitCap(b"1")))
        run(theirs.unlink("next"))
        turn = Link("new", LitCap(b"2")), Unlink("current", False), Rename("next", "current")
        joined = [mine.change(turn), mine.link("beside", LitCap(b"3"))]
        results = run(DeferredList(joined, consumeErrors=True))
        self.assertEqual([success for success, _ in results], [False, True])
        self.assertIsInstance(results[0][1].value, NoSuchChild)
        self.assertEqual([name for name, *_ in world.state()[0]], ["beside"])

    def test_gone_before_it_was_tried(self) -> None:
        """What no server has taken is not why a child is gone, or another is in its place."""
        world = World(0)
        run = world.world.run
        mine, theirs = (directories[0] for directories in world.clients)
        for edit in (Unlink("a"), Rename("a", "b")):
            run(mine.change([Link("a", LitCap(b"1")), Unlink("b", False)]))
            run(theirs.change([Unlink("a"), Link("b", LitCap(b"2"))]))
            with self.assertRaises(NoSuchChild):
                run(mine.change([edit]))
            self.assertEqual([cap for _, cap, _ in world.state()[0]], [str(LitCap(b"2"))])

    def test_moved_by_two(self) -> None:
        """Of two who move a child to different directories the one who comes too late is told."""
        world = World(0)
        third = DirectoryCap(world.world.create(b""))
        world.world.run(world.clients[0][0].link("a", LitCap(b"1")))
        moves = []
        for client in range(2):
            grid: Any = Files(world.world.client())
            here = Directory(grid, world.clients[0][0].cap, world.world.clock.seconds)
            to = world.clients[0][1].cap if client else third
            there = Directory(grid, to, world.world.clock.seconds)
            moves.append(Deferred.fromCoroutine(move(here, "a", there, "a")))
        results = world.world.run(DeferredList(moves, consumeErrors=True))
        self.assertEqual(sorted(success for success, _ in results), [False, True])
        failure = next(result for success, result in results if not success)
        self.assertIn("another client removed 'a' from its old place", str(failure.value))

    def attempt(self, seed: int, rounds: int) -> None:
        """Let so many rounds of a seed happen."""
        state: State = ((), ())
        try:
            # Salts and keys decide the order of versions with one number.
            with mock.patch("os.urandom", Random(seed).randbytes):
                world = World(seed)
                for _ in range(rounds):
                    state = world.round(state)
        except AssertionError as error:
            raise self.failureException(
                f"seed {seed}, after {world.made} links: {error}"
            ) from error
        self.assertEqual(world.world.leftovers(), [])
