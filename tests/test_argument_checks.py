"""Whoever passes something wrong is told so in a sentence, and by no assertion."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, maybeDeferred, succeed
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.http_headers import Headers

import pipegrid
from pipegrid import (
    AutoWindow,
    Grid,
    Params,
    Pipeline,
    PipelinedAgent,
    SinkError,
    SourceError,
    UsageError,
    errors,
    parse_cap,
)
from pipegrid.core.caps import as_cap
from pipegrid.grid.client_creation import create_local
from pipegrid.http11 import Limits
from pipegrid.transfer.offline_encoding import decode_file, encode_file
from pipegrid.tree.tree_grid import Trees
from pipegrid.tree.tree_upload import TreeReports

reactor: Any = installed_reactor
Wrong = Iterator[tuple[str, Callable[[], Any]]]
"""What the sentence says, and the call."""

_ANYTHING: tuple[Any, ...] = (None, 5, [])
DATA = b"more than fifty-five bytes " * 9


def wrong_caps(use: Callable[[Any], Any]) -> Wrong:
    """Yield uses of what is no capability."""
    for cap, shown in (
        (None, "None"),
        (5, "5 (int)"),
        (b"URI:LIT:onugk43", "a bytes"),
        (("URI:LIT:onugk43",), "a tuple"),
        (DATA, "a bytes"),
    ):
        sentence = f"a capability is text, or what a put gave as 'result.cap', not {shown}"
        yield sentence, partial(use, cap)


class PlainTests(SynchronousTestCase):
    """What answers at once."""

    def check(self, sentence: str, call: Callable[[], Any]) -> None:
        """The call fails with such a sentence, whether at once or through a Deferred."""
        failed = self.failureResultOf(maybeDeferred(call), UsageError)
        self.assertIn(sentence, str(failed.value))

    def test_params(self) -> None:
        """Numbers of shares are whole numbers."""
        for arguments, sentence in (
            (("3", 10), "the number of required shares is a whole number, not '3' (str)"),
            ((3.0, 10), "the number of required shares is a whole number, not 3.0 (float)"),
            ((True, 10), "not True (bool)"),
            ((3, None), "the number of total shares is a whole number, not None"),
            ((3, 10, "x"), "the segment size is a whole number"),
            ((0, 10), "cannot encode 0 of 10"),
        ):
            self.check(sentence, partial(Params, *arguments))

    def test_caps(self) -> None:
        """A capability that is to be parsed is text."""
        for cap in (None, 5, b"URI:CHK:"):
            self.check("a capability is text, not", partial(parse_cap, cast(str, cap)))

    def test_secrets(self) -> None:
        """What may be a secret is not shown, however short it is."""
        for sentence, call in wrong_caps(as_cap):
            self.check(sentence, call)
        wrong: Any = "of a friend"
        self.check(
            "a convergence secret is bytes, not a str",
            lambda: encode_file(DATA, self.mktemp(), Params(3, 10), wrong),
        )

    def test_pipelines(self) -> None:
        """Windows and sizes are numbers of bytes, and what is called can be."""
        pipeline = Pipeline(50_000)
        calls: tuple[tuple[str, Callable[..., Any], tuple[Any, ...]], ...] = (
            ("a window is a number of bytes or a window, not None", Pipeline, (None,)),
            ("a window is a number of bytes or a window, not 'x' (str)", Pipeline, ("x",)),
            ("a window is a whole number, not True (bool)", Pipeline, (True,)),
            ("sends nothing", Pipeline, (0,)),
            ("a clock is the reactor, not 5 (int)", Pipeline, (50_000, 5)),
            ("the size of a call is a whole number, not 1.5", pipeline.add, (1.5, succeed)),
            ("the size of a call is a whole number, not None", pipeline.add, (None, succeed)),
            ("give 0 or more", pipeline.add, (-1, succeed)),
            ("a pipeline calls functions, not 7 (int)", pipeline.add, (1, 7)),
            ("a pipeline calls functions, not None", pipeline.add_letting_go, (1, None)),
            ("the least window is a whole number", AutoWindow, ("x",)),
        )
        for sentence, call, arguments in calls:
            self.check(sentence, partial(call, *arguments))
        self.assertIn("open: 0 of", repr(pipeline))
        self.successResultOf(pipeline.add(1, lambda: None))

    def test_agents(self) -> None:
        """Requests are bytes, as with Twisted's agent."""
        agent = PipelinedAgent(Clock())
        uri = b"http://host.test/"
        requests: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
            ("the method of a request is bytes, not 'GET' (str)", ("GET", uri), {}),
            ("the URI of a request is bytes, not 'http://x/' (str)", (b"GET", "http://x/"), {}),
            ("the URI of a request is bytes, not None", (b"GET", None), {}),
            ("headers is a Headers", (b"GET", uri, {b"a": [b"b"]}), {}),
            ("the body of a request is an IBodyProducer", (b"POST", uri, Headers(), b"body"), {}),
            ("expected_response_bytes is a whole number of at least 0, not -1", (b"GET", uri), {
                "expected_response_bytes": -1
            }),
            ("timeout_s is a number of seconds above 0", (b"GET", uri), {"timeout_s": "1"}),
        )  # fmt: skip
        for sentence, arguments, options in requests:
            self.check(
                sentence,
                partial(agent.request, *arguments, **options),
            )
        nothing: Any = None
        self.check("the URI of a request is bytes", lambda: agent.pool_for(nothing))
        self.check("reactor is an IReactorTime", lambda: PipelinedAgent(nothing))
        five: Any = 5
        self.check("an IAgentEndpointFactory", lambda: PipelinedAgent(Clock(), five))
        self.check("limits is a Limits", lambda: PipelinedAgent(Clock(), None, five))
        self.check(
            "max_connections is a whole number of at least 1", lambda: Limits(max_connections=0)
        )
        self.check("timeout_s is a number of seconds", lambda: Limits(timeout_s=-1.0))

    def test_files_without_a_grid(self) -> None:
        """Encoding and decoding look at what they get before they write anything."""
        place = self.mktemp()
        params, out = Params(1, 2), io.BytesIO()
        cap: Any = encode_file(DATA, place, params, b"").cap
        wrong: Any = 5
        self.check(
            "how a file is encoded is a Params", lambda: encode_file(DATA, place, wrong, b"")
        )
        self.check("a convergence secret", lambda: encode_file(DATA, place, params, wrong))
        self.check("where share files go", lambda: encode_file(DATA, wrong, params, b""))
        self.check("what is stored is bytes", lambda: encode_file(wrong, place, params, b""))
        self.check("what a file is restored by", lambda: decode_file(wrong, [], out))
        self.check("from a list of paths", lambda: decode_file(cap, wrong, out))
        self.check("from a list of paths", lambda: decode_file(cap, place, out))
        self.check("where a file goes is", lambda: decode_file(cap, [], wrong))
        self.assertEqual(sorted(path.name for path in Path(place).iterdir()), ["0", "1"])


class GridTests(TestCase):
    """``Grid``, on an embedded one."""

    async def open(self) -> Grid:
        """Return a grid."""
        directory = Path(self.mktemp())
        create_local(directory)
        grid = await Grid.open(reactor, directory)
        self.addCleanup(grid.close)
        return grid

    async def check(self, calls: Wrong, kind: type[Exception] = UsageError) -> None:
        """Each call answers with a Deferred, which fails with such a sentence."""
        for sentence, call in calls:
            with self.assertRaises(kind) as caught:
                answer = call()
                self.assertIsInstance(answer, Deferred)
                await answer
            self.assertIn(sentence, str(caught.exception))

    async def test_open(self) -> None:
        """A grid wants a reactor and a path."""
        wrong: Any = 5
        directory = self.mktemp()
        create_local(Path(directory))
        await self.check(
            iter(
                (
                    (
                        "a grid needs the running reactor, not a Clock",
                        lambda: Grid.open(Clock(), directory),
                    ),
                    ("a client's directory is a path", lambda: Grid.open(reactor, wrong)),
                    ("wait_for is", lambda: Grid.open(reactor, "x", wait_for=-1)),
                    ("window_bytes is", lambda: Grid.open(reactor, "x", window_bytes=0)),
                    ("a tracer is", lambda: Grid.open(reactor, "x", tracer=wrong)),
                    ("max_segment_bytes is", lambda: Grid.open(reactor, "x", max_segment_bytes=0)),
                )
            )
        )

    async def test_put(self) -> None:
        """What is stored, how, and who is told."""
        grid = await self.open()

        def calls() -> Wrong:
            for what, shown in zip(_ANYTHING, ("None", "5 (int)", "[] (list)"), strict=True):
                sentence = (
                    "what is stored is bytes, a path, a file opened in binary mode, an async iterator, "
                    f"an IBodyProducer or an IResponse, not {shown}"
                )
                yield sentence, partial(grid.put, what)
            options: tuple[tuple[str, dict[str, Any]], ...] = (
                ("how a file is encoded is a Params", {"params": (3, 10)}),
                ("the number of servers of happiness is a whole number", {"happy": 2.5}),
                ("the number of servers of happiness is a whole number", {"happy": "7"}),
                ("the number of servers of happiness is a whole number", {"happy": True}),
                ("10 shares can never be on 11 servers", {"happy": 11}),
                ("a convergence secret is bytes, not a str", {"convergence": "text"}),
                ("progress is a function to be called, not 5", {"progress": 5}),
            )
            for sentence, option in options:
                yield sentence, partial(grid.put, DATA, **option)
            for sources in (None, DATA, "path", 5, iter([DATA])):
                many: Any = sources
                yield "the sources must be a list", partial(grid.put_many, many)
            five: Any = 5
            yield "ended is a function", lambda: grid.put_many([DATA], ended=five)

        await self.check(calls())
        failed: Any = (await grid.put_many([None]))[0]  # type: ignore[list-item]
        failed.trap(UsageError)
        text: Any = io.StringIO("text" * 99)
        await self.check(iter([("binary mode", lambda: grid.put(text))]), SourceError)
        closed = io.BytesIO(DATA)
        closed.close()
        cap = str((await grid.put(DATA)).cap)
        for source, words in ((closed, "it is closed"), (cap, "this is a capability")):
            with self.assertRaises(SourceError) as caught:
                await grid.put(source)
            self.assertIn(words, str(caught.exception))
            shown = Failure(caught.exception).getTraceback()
            self.assertNotIn(cap.split(":")[2], shown)

    async def test_get(self) -> None:
        """What is fetched, which part of it, and where it goes; and the same for checks and repairs."""
        grid = await self.open()
        cap = (await grid.put(DATA)).cap
        into = io.BytesIO()

        def calls() -> Wrong:
            yield from wrong_caps(lambda cap: grid.get(cap, into))
            yield from wrong_caps(grid.read)
            yield from wrong_caps(grid.check)
            yield from wrong_caps(grid.repair)
            for where in _ANYTHING:
                yield "where a file goes is a file opened", partial(grid.get, cap, where)
            for start in ("x", 1.5, None, True):
                begin: Any = start
                yield "the beginning of a range", partial(grid.read, cap, begin)
            for length in ("x", 1.5, True):
                size: Any = length
                yield "the length of a range", partial(grid.get, cap, into, length=size)
            five: Any = 5
            yield "progress is", lambda: grid.get(cap, into, progress=five)
            yield "progress is", lambda: grid.check(cap, progress=five)
            yield "progress is", lambda: grid.repair(cap, progress=five)

        await self.check(calls())
        text: Any = io.StringIO()
        closed = io.BytesIO()
        closed.close()

        def places() -> Wrong:
            yield "binary mode", lambda: grid.get(cap, text)
            yield "closed file", lambda: grid.get(cap, closed)
            yield "'' is not the path of a file", lambda: grid.get(cap, "")
            yield "'a\\x00b' is not the path", lambda: grid.get(cap, "a\0b")

        await self.check(places(), SinkError)
        self.assertEqual(await grid.read(cap), DATA)

    async def test_trees(self) -> None:
        """Where trees come from and go, how much may be done, and who is told."""
        grid = await self.open()
        cap = (await grid.create_directory()).cap
        here = self.mktemp()
        Path(here).mkdir()
        wrong: Any = 5

        def calls() -> Wrong:
            for each in (None, b"x", 5):
                path: Any = each
                yield "directory is a path", partial(grid.tree.get_tree, cap, path)
                yield "directory is a path", partial(grid.tree.put_tree, path)
            gets = ("progress", "problem", "done"), grid.tree.get_tree, (cap, here)
            checks = ("ended", "unreadable"), grid.tree.check_tree, (cap,)
            for names, method, arguments in (gets, checks):
                for name in names:
                    yield f"{name} is a function", partial(method, *arguments, **{name: wrong})
            yield "a GetTreeLimits", lambda: grid.tree.get_tree(cap, here, limits=wrong)
            yield (
                "metadata_json is bytes",
                lambda: grid.tree.get_tree(cap, here, metadata_json=wrong),
            )
            yield "a TreeReports", lambda: grid.tree.put_tree(here, reports=wrong)
            yield (
                "left_out is a function",
                lambda: grid.tree.put_tree(here, reports=TreeReports(wrong)),
            )
            yield "a TreeSelection", lambda: grid.tree.put_tree(here, selection=wrong)
            yield "a Params", lambda: grid.tree.put_tree(here, params=wrong)
            yield "servers of happiness", lambda: grid.tree.put_tree(here, happy="3")
            yield "a convergence secret", lambda: grid.tree.put_tree(here, convergence=wrong)
            yield "an UpkeepSettings", lambda: grid.tree.check_tree(cap, bounds=wrong)
            yield "an UpkeepSettings", lambda: grid.check_many([cap], bounds=wrong)
            yield "a ListingLimits", lambda: grid.directory(cap).list(wrong)
            yield "a ListingLimits", lambda: grid.tree.list_directory(cap, wrong)

        await self.check(calls())
        for walk in (
            lambda: grid.tree.walk(wrong),
            lambda: grid.tree.walk(cap, limits=wrong),
            lambda: grid.tree.walk(cap, listing=wrong),
        ):
            self.assertRaises(UsageError, walk)


class NamesTests(SynchronousTestCase):
    """What ``pipegrid`` itself has."""

    def test_errors(self) -> None:
        """Every error can be had from it, and every name that it says it has."""
        found = {
            name
            for name, each in vars(errors).items()
            if isinstance(each, type) and each.__module__ == errors.__name__ and name[0] != "_"
        }
        self.assertEqual(found - set(pipegrid.__all__), set())
        for name in pipegrid.__all__:
            self.assertTrue(hasattr(pipegrid, name), name)
            self.assertIn(name, dir(pipegrid))
        self.assertIs(pipegrid.UnhappyError, errors.UnhappyError)
        self.assertFalse(hasattr(pipegrid, "nonsense"))

    def test_what_comes_of_methods(self) -> None:
        """``help`` says that a Deferred comes of a method, where one does."""
        told: dict[str, str] = {}
        for kind in (pipegrid.Grid, pipegrid.Directory, Trees):
            for name, method in inspect.getmembers(kind, callable):
                if not (name.startswith("_") or inspect.iscoroutinefunction(method)):
                    told[name] = str(inspect.signature(method).return_annotation)
        at_once = {name for name, result in told.items() if not result.startswith("Deferred[")}
        others = {"walk", "directory", "applied", "check_access", "add_warning"}
        others |= {"known_content", "reading_a_tree"}
        self.assertEqual(at_once - others, set())
        self.assertEqual(told["get"], "Deferred[GetResult]")
        self.assertEqual(told["read"], "Deferred[bytes]")
        self.assertEqual(told["list"], "Deferred[dict[str, Child]]")
