"""Which directories can be packed, and when a tree is stored."""

from __future__ import annotations

import hashlib
from random import Random

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap
from pipegrid.core.packed_directory import (
    PackedChild,
    directory_cap,
    pack_immutable,
    unpack_immutable,
)
from pipegrid.tree.tree_plan import (
    MAX_DIRECTORY_BYTES,
    MAX_ENTRIES,
    DirectoryNode,
    TreeNode,
    TreePlan,
)

STORED: dict[Cap, bytes] = {}


def cap_of(children: list[PackedChild]) -> Cap:
    """A directory's cap, which follows from its bytes."""
    packed = pack_immutable(children)
    digest = hashlib.sha256(packed).digest()
    cap = directory_cap(ChkCap(digest[:16], digest, 3, 10, 100 + len(packed)))
    STORED[cap] = packed
    return cap


def contents(cap: Cap | None) -> object:
    """What a tree holds: names and contents."""
    if isinstance(cap, DirectoryCap):
        return {each.name: contents(each.cap) for each in unpack_immutable(STORED[cap])}
    assert isinstance(cap, LitCap), cap
    return cap.data


class TreePlanTests(SynchronousTestCase):
    """The order of things."""

    def setUp(self) -> None:
        self.plan = TreePlan()
        self.root = self.plan.enter(None, "", {})

    def take(self) -> tuple[DirectoryNode, Cap]:
        """Return the directory that is to be stored now, and what its cap will be."""
        ready = self.plan.take_ready()
        assert ready is not None, "nothing is ready"
        return ready[0], cap_of(ready[1])

    def nothing_ready(self) -> None:
        """Nothing can be packed."""
        self.assertIsNone(self.plan.take_ready())

    def test_an_empty_directory(self) -> None:
        """It is packed when the walk leaves it, and settled when it is stored."""
        self.nothing_ready()
        self.plan.leave(self.root)
        directory, cap = self.take()
        self.assertIs(directory, self.root)
        self.assertFalse(self.plan.done)
        self.plan.stored(directory, cap)
        self.assertEqual(self.plan.root_cap, cap)

    def test_a_deep_tree_leaves_at_once(self) -> None:
        """Caps that are known suffice: nothing has been stored when the root is packed."""
        directories = [self.root]
        files = []
        for depth in range(20):
            files.append(self.plan.expect(directories[-1], "f", {"depth": depth}))
            directories.append(self.plan.enter(directories[-1], "d", {}))
        for directory in reversed(directories):
            self.plan.leave(directory)
        for file in files:
            self.plan.known(file, LitCap(b"x"))
        sent = []
        for _ in range(21):
            directory, cap = self.take()
            self.plan.known(directory, cap)
            sent.append((directory, cap))
        self.assertEqual([directory for directory, _ in sent], directories[::-1])
        self.nothing_ready()
        self.assertFalse(self.plan.done)
        for directory, cap in sent:
            self.plan.stored(directory, cap)
        self.assertFalse(self.plan.done)
        for file in files:
            self.assertFalse(self.plan.done)
            self.plan.stored(file, LitCap(b"x"))
        self.assertEqual(self.plan.root_cap, sent[-1][1])

    def test_names_that_look_the_same(self) -> None:
        """Each gets one of its own, also beside true ones; ten times as many are ten times as much work."""
        looked = 0

        class Counting(dict):  # type: ignore[type-arg]
            def __contains__(self, key: object) -> bool:
                nonlocal looked
                looked += 1
                return super().__contains__(key)

        self.root.entries = Counting()
        self.plan.expect(self.root, "? (3)", {})
        for _ in range(1000):
            self.plan.expect(self.root, self.plan.free_name(self.root, "?"), {})
        names = list(self.root.entries)
        self.assertEqual(names[:5], ["? (3)", "?", "? (2)", "? (4)", "? (5)"])
        self.assertEqual(len(names), 1001)
        self.assertLess(looked, 4000)

    def test_a_child_that_fails_late(self) -> None:
        """Directories that hold its cap are made again, without it, once all else is settled."""
        inner = self.plan.enter(self.root, "d", {})
        good, bad = (self.plan.expect(inner, name, {}) for name in ("good", "bad"))
        self.plan.leave(inner)
        self.plan.leave(self.root)
        for file in (good, bad):
            self.plan.known(file, LitCap(b"x"))
        for _ in range(2):
            directory, cap = self.take()
            self.plan.known(directory, cap)
            self.plan.stored(directory, cap)
        self.plan.failed(bad)
        self.nothing_ready()  # something else may fail
        self.plan.stored(good, LitCap(b"x"))
        for directory in (inner, self.root):
            again, cap = self.take()
            self.assertIs(again, directory)
            self.plan.known(again, cap)
            self.assertFalse(self.plan.done)
            self.plan.stored(again, cap)
        self.assertEqual(contents(self.plan.root_cap), {"d": {"good": b"x"}})

    def test_a_directory_that_fails(self) -> None:
        """All of it is left out, whatever becomes of what is in it; the rest is stored."""
        inner = self.plan.enter(self.root, "d", {})
        file = self.plan.expect(inner, "f", {})
        other = self.plan.expect(self.root, "other", {})
        self.plan.leave(inner)
        self.plan.leave(self.root)
        self.plan.known(file, LitCap(b"x"))
        self.plan.stored(other, LitCap(b"y"))
        directory, cap = self.take()
        self.plan.failed(directory)
        self.plan.stored(file, LitCap(b"x"))
        directory, cap = self.take()
        self.plan.stored(directory, cap)
        self.assertEqual(contents(self.plan.root_cap), {"other": b"y"})

    def test_the_root_fails(self) -> None:
        """Then there is nothing."""
        self.plan.leave(self.root)
        self.plan.failed(self.take()[0])
        self.assertTrue(self.plan.done and self.plan.root_failed)

    def test_room(self) -> None:
        """No directory becomes larger than readers take."""
        entries = 0
        while self.plan.has_space(self.root):
            self.plan.expect(self.root, f"{entries:0250}", {})
            entries += 1
        self.assertEqual(entries, MAX_DIRECTORY_BYTES // (250 + 400 + 150) + 1)
        many = self.plan.enter(None, "", {})
        for number in range(MAX_ENTRIES):
            many.entries[str(number)] = self.root.entries[f"{0:0250}"]
        self.assertFalse(self.plan.has_space(many))

    def test_any_order(self) -> None:
        """Whatever comes first, and whoever fails, the tree holds what is stored and nothing else."""
        for seed in range(300):
            random = Random(seed)
            self.setUp()
            expected = self.random_run(random)
            with_seed = f"seed {seed}"
            if expected is None:
                self.assertTrue(self.plan.root_failed, with_seed)
            else:
                self.assertEqual(contents(self.plan.root_cap), expected, with_seed)
                self.assertFalse(self.plan.root_failed, with_seed)

    def random_run(self, random: Random) -> object:
        """Walk a random tree, with random outcomes at random times; return what should be stored."""
        walk = [self.root]
        left = 12
        on_the_way: list[tuple[TreeNode, Cap, bool]] = []
        failed: set[TreeNode] = set()
        made: list[TreeNode] = [self.root]
        while walk or on_the_way or not self.plan.done:
            ready = self.plan.take_ready() if random.random() < 0.8 else None
            if ready is not None:
                on_the_way.append((ready[0], cap_of(ready[1]), False))
            act = random.random()
            if walk and act < 0.5:
                if left and act < 0.2:
                    left -= 1
                    made.append(self.plan.expect(walk[-1], f"f{left}", {}))
                    on_the_way.append((made[-1], LitCap(b"%d" % left), False))
                elif left and act < 0.35:
                    left -= 1
                    walk.append(self.plan.enter(walk[-1], f"d{left}", {}))
                    made.append(walk[-1])
                else:
                    self.plan.leave(walk.pop())
            elif on_the_way:
                place, cap, known = on_the_way.pop(random.randrange(len(on_the_way)))
                if act < 0.55:
                    failed.add(place)
                    self.plan.failed(place)
                elif known or act < 0.7:
                    self.plan.stored(place, cap)
                else:
                    self.plan.known(place, cap)
                    on_the_way.append((place, cap, True))
            if self.root in failed:
                return None
        assert self.plan.take_ready() is None
        tree: dict[TreeNode, object] = {}
        for place in made:
            tree[place] = {} if isinstance(place, DirectoryNode) else place.name[1:].encode()
            parent = place.parent
            if parent is not None and place not in failed and parent in tree:
                inside = tree[parent]
                assert isinstance(inside, dict)
                inside[place.name] = tree[place]
            elif parent is not None:
                del tree[place]
        return tree[self.root]
