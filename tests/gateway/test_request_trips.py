"""How many round trips requests of the web API take, on a grid in virtual time."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase
from twisted.web.http_headers import Headers

from pipegrid.core import base32
from pipegrid.core.caps import DirectoryCap, parse_cap
from pipegrid.core.mutable import keys
from pipegrid.errors import AccessProhibited, ChildExists
from pipegrid.gateway.body_spool import BodySpool, SpoolSpace
from pipegrid.gateway.gateway_settings import GatewaySettings
from pipegrid.gateway.http_response import HttpResponse, WebError
from pipegrid.gateway.web_api.api_request import ApiRequest
from pipegrid.gateway.web_api.object_resource import _POSTS, answer_object
from pipegrid.gateway.web_api.web_arguments import Arguments
from pipegrid.grid.access_blacklist import AccessBlacklist
from pipegrid.testing.grid import SimulatedGrid
from tests.gateway.test_restic_repository import SpareKeys
from tests.transfer.world import content


def index_of(text: str) -> str:
    """Return the storage index of a directory, as names of files and the blacklist have it."""
    cap = parse_cap(text)
    assert isinstance(cap, DirectoryCap)
    assert cap.storage_index is not None
    return base32.encode(cap.storage_index)


class RequestTripsTests(TestCase):
    """Ten servers, 50 ms away."""

    def setUp(self) -> None:
        self.patch(keys, "generate", SpareKeys().generate)
        self.place = Path(self.mktemp())
        self.world = SimulatedGrid(str(self.place))
        self.addCleanup(self.world.close)
        self.grid: Any = self.world.client()
        self.root = str(self.ask("POST", "/uri", t="mkdir")[0].body)
        self.ask("GET", f"/uri/{self.root}", t="json")  # all connections are up

    def ask(
        self, method: str, path: str, body: bytes = b"", grid: Any = None, **values: str
    ) -> tuple[HttpResponse, float]:
        """Make one request; returns its response, and the round trips until it was there."""
        began_s = self.world.clock.seconds()
        response = self.world.run(self.begin(method, path, body, grid, **values))
        assert response is not None
        return response, round((self.world.clock.seconds() - began_s) / 0.1, 1)

    def begin(
        self, method: str, path: str, body: bytes = b"", grid: Any = None, **values: str
    ) -> Deferred[Any]:
        """Begin a request; fires with its response."""
        settings = GatewaySettings(self.place)
        spool = BodySpool(SpoolSpace(settings.temporary, 0), len(body))
        spool.write(body)
        call = ApiRequest(
            SimpleNamespace(requestHeaders=Headers()),
            grid or self.grid,
            settings,
            method,
            path.split("/")[1:],
            Arguments(values),
            spool,
        )
        return Deferred.fromCoroutine(answer_object(_POSTS, call))

    def test_link_a_cap(self) -> None:
        """The directory is changed at once: its change finds out what has the name."""
        cap = str(self.ask("PUT", "/uri", content(300))[0].body).encode()
        path = f"/uri/{self.root}/link"
        for _ in range(2):  # a new link, and one that is replaced
            response, trips = self.ask("PUT", path, cap, t="uri")
            self.assertEqual((response.status, response.body, trips), (200, cap.decode(), 1.0))
        with self.assertRaises(ChildExists):
            self.ask("PUT", path, cap, t="uri", replace="false")
        self.assertEqual(self.ask("GET", path, t="uri")[0].body, cap.decode())

    def test_link_below_directories(self) -> None:
        """Directories on the way are read, and missing ones are made."""
        cap = str(self.ask("PUT", "/uri", content(300))[0].body).encode()
        for path, most in (("a/b/link", 9.0), ("a/link", 2.0), ("a/b/link", 3.0)):
            self.assertLessEqual(self.ask("PUT", f"/uri/{self.root}/{path}", cap, t="uri")[1], most)
            found = self.ask("GET", f"/uri/{self.root}/{path}", t="uri")[0]
            self.assertEqual(found.body, cap.decode())
        for path, status in (("a/link/x", 409), ("a//x", 400), ("a/none/x/", 200)):
            try:
                got = self.ask("PUT", f"/uri/{self.root}/{path}", cap, t="uri")[0].status
            except WebError as error:
                got = error.status
            self.assertEqual(got, status, path)

    def test_read_after_a_put(self) -> None:
        """What has stored a file is connected, and needs no further connections to read a directory."""
        grid = self.world.client("other")
        self.ask("PUT", "/uri", content(300), grid)
        for _ in range(2):
            response, trips = self.ask("GET", f"/uri/{self.root}", grid=grid, t="json")
            self.assertEqual((response.status, trips), (200, 1.0))

    def test_make_a_directory(self) -> None:
        """It is created at once where the directory above is remembered, and linked then."""
        path = f"/uri/{self.root}/made"
        made, trips = self.ask("POST", path, t="mkdir")
        self.assertEqual((made.status, trips), (200, 2.0))
        again, trips = self.ask("POST", path, t="mkdir")
        self.assertEqual((again.body, trips), (made.body, 1.0))
        self.assertEqual(self.ask("PUT", f"{path}/inner", t="mkdir")[1], 3.0)
        with self.assertRaises(WebError) as caught:
            self.ask("POST", path, b"{}", t="mkdir-with-children")
        self.assertEqual(caught.exception.status, 409)

    def test_make_a_named_directory(self) -> None:
        """One that replaces what has its name needs no look at it."""
        caps = set()
        for _ in range(2):
            made, trips = self.ask("POST", f"/uri/{self.root}", t="mkdir", name="named")
            self.assertEqual((made.status, trips), (200, 2.0))
            caps.add(made.body)
        self.assertEqual(len(caps), 2)
        with self.assertRaises(WebError) as caught:
            self.ask("POST", f"/uri/{self.root}", t="mkdir", name="named", replace="false")
        self.assertEqual(caught.exception.status, 409)

    def test_a_directory_that_another_client_made(self) -> None:
        """What is remembered of the directory above is old: the existing one is found, and stays."""
        path = f"/uri/{self.root}/made"
        theirs = self.ask("POST", path, grid=self.world.client("other"), t="mkdir")[0].body
        self.assertEqual(self.ask("POST", path, t="mkdir")[0].body, theirs)
        self.assertEqual(self.ask("GET", path, t="uri")[0].body, theirs)
        self.ask("PUT", f"/uri/{self.root}/file", b"a file", self.world.client("other"))
        with self.assertRaises(WebError) as caught:
            self.ask("POST", f"/uri/{self.root}/file", t="mkdir")
        self.assertEqual(caught.exception.status, 400)

    def test_a_blocked_directory_that_another_client_made(self) -> None:
        """Its cap is not told, as where the directory above is read first."""
        path = f"/uri/{self.root}/made"
        theirs = str(self.ask("POST", path, grid=self.world.client("other"), t="mkdir")[0].body)
        (self.place / "access.blacklist").write_text(f"{index_of(theirs)} by a court\n")
        self.grid._blacklist = AccessBlacklist(self.place)
        for _ in range(2):  # as it is remembered, and as it is now
            with self.assertRaises(AccessProhibited):
                self.ask("POST", path, t="mkdir")

    def test_one_directory_at_once(self) -> None:
        """Requests for the same new directory all get the one that is linked."""
        path = f"/uri/{self.root}/made"
        answers = [self.begin("POST", path, t="mkdir") for _ in range(3)]
        caps = {self.world.run(each).body for each in answers}
        self.assertEqual(caps, {self.ask("GET", path, t="uri")[0].body})

    def test_lost_directory(self) -> None:
        """It is reported as when it is read."""
        for server in self.world.servers:
            server.host.crash(1e9)
        with self.assertRaises(WebError) as caught:
            self.ask("PUT", f"/uri/{self.root}/link", b"URI:LIT:nbuq", self.world.client(), t="uri")
        self.assertEqual(caught.exception.status, 410)
        self.assertIn("UnrecoverableFileError", str(caught.exception))

    def test_named_directory_in_a_lost_one(self) -> None:
        """It is reported as when it is read."""
        for server in self.world.servers:
            for directory in server.root.glob(f"shares/*/{index_of(self.root)}"):
                shutil.rmtree(directory)
        with self.assertRaises(WebError) as caught:
            self.ask("POST", f"/uri/{self.root}", grid=self.world.client(), t="mkdir", name="new")
        self.assertEqual(caught.exception.status, 410)
        self.assertIn("UnrecoverableFileError", str(caught.exception))
