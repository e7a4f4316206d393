"""The page of a directory: it is browsed and changed as with a browser that runs no scripts."""

from __future__ import annotations

import json
import os
import time
from typing import Any
from unittest import mock
from urllib.parse import quote

import attrs

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, UnknownCap, parse_cap
from pipegrid.core.mutable.directory_content_edits import Link
from pipegrid.core.packed_directory import directory_cap, pack_immutable
from pipegrid.gateway import form_body
from pipegrid.gateway.web_api import form_upload
from pipegrid.gateway.web_api.children_json import packed_children
from pipegrid.gateway.web_ui.directory_page import PAGE_NAME_CHARACTERS, PAGE_ROWS
from pipegrid.tree.directory import create_directory
from tests.gateway.web_ui.interface_world import InterfaceTestCase
from tests.gateway.web_ui.page_browser import Node

LIT = parse_cap("URI:LIT:nbswy3dp")
FUTURE = UnknownCap("ro.URI:FUTURE:abc")

ODD_NAMES = {
    '"><script>alert(1)</script>': '"><script>alert(1)</script>',
    "{{ 7 * 7 }}{% raw %}": "{{ 7 * 7 }}{% raw %}",
    "&amp;&lt;'": "&amp;&lt;'",
    "abc\u202egnp.exe": r"abc\u202egnp.exe",
    "\u05e9\u05dc\u05d5\u05dd": "\u05e9\u05dc\u05d5\u05dd",
    "two  spaces": "two spaces",
    " around ": "around",
    "a\nb": r"a\nb",
    "a/b": "a/b",
    ".": ".",
    "..": "..",
    "%2e%2e": "%2e%2e",
    "?t=json#x": "?t=json#x",
    "\x00": r"\x00",
    "javascript:alert(1)": "javascript:alert(1)",
    "x" * 400: "x" * 80 + "\u2026" + "x" * 80,
}
"""Names of children, and the text that shows each of them."""


class DirectoryTestCase(InterfaceTestCase):
    """Has helpers for directories."""

    def directory_of(self, children: dict[str, Any]) -> DirectoryCap:
        """Store a mutable directory with these caps, or caps with metadata."""
        links = []
        for name, given in children.items():
            cap, metadata = given if isinstance(given, tuple) else (given, None)
            links.append(Link(name, cap, cap if isinstance(cap, UnknownCap) else None, metadata))
        return self.run_now(create_directory(self.grid, None, links)).cap

    def immutable_of(self, children: dict[str, Cap]) -> DirectoryCap:
        """Store an immutable directory with these caps."""
        given = {name: {"ro_uri": str(cap), "metadata": {}} for name, cap in children.items()}
        made = directory_cap(self.put(pack_immutable(packed_children(given))))
        assert isinstance(made, DirectoryCap)
        return made

    def verify_cap(self) -> Cap:
        """Store a file; returns the cap that checks its shares."""
        cap = self.put(b"x" * 100)
        assert isinstance(cap, ChkCap)
        return cap.verifier()

    def names_in(self, cap: Cap) -> list[str]:
        """Return the names in a directory."""
        children = self.world.run(self.grid.directory(cap).list())
        return sorted(children)

    def show(self, cap: Cap, rest: str = "") -> None:
        """Open the page of a directory, which has to be a good one."""
        self.browser.open(f"/uri/{quote(str(cap), safe='')}/{rest}")
        self.assertEqual(self.browser.answer.status, 200, self.browser.text)
        self.check_page()

    def shown_names(self) -> list[str]:
        """Return the names that the page shows, in its order."""
        return [
            head.one("div", class_="entry").children[1].text  # type: ignore[union-attr]
            for head in self.browser.page.all("th", scope="row")
        ]


class BrowseTests(DirectoryTestCase):
    def test_down_and_up(self) -> None:
        """Into a directory, to a file in it, and back by the path; titles have names, and no caps."""
        inner = self.directory_of({"b.txt": LIT})
        self.show(self.directory_of({"a": inner}))
        self.browser.follow("a")
        self.check_page()
        self.assertEqual(self.browser.page.one("h1").text, "a")
        self.browser.follow("b.txt")
        self.check_page()
        self.assertEqual(self.browser.page.one("title").text, "b.txt \u00b7 PipeGrid")
        self.browser.follow("a").follow("Directory")
        self.check_page()
        self.assertEqual(self.shown_names(), ["a"])
        self.assertNotIn("URI", "".join(self.lines))

    def test_download(self) -> None:
        """The file is saved under its name; its URL has its own read cap, not that of the directory."""
        self.show(self.directory_of({"n\u00e4me.txt": LIT}))
        self.browser.follow("Download n\u00e4me.txt")
        answer = self.browser.answer
        self.assertEqual(answer.body, b"hello")
        self.assertIn("filename*=UTF-8''n%C3%A4me.txt", answer.headers["content-disposition"])
        self.assertIn("sandbox", answer.headers["content-security-policy"])
        self.assertNotIn("DIR2", self.browser.url)

    def test_orders(self) -> None:
        """Directories first, numbers by their value; sizes and dates the largest first."""
        children = {
            "file 10": (LIT, {"mtime": 3}),
            "file 9": (self.put(b"x" * 100), {"mtime": 1}),
            "Zoo": (self.directory_of({}), {"mtime": 2}),
        }
        cap = self.directory_of(children)
        self.show(cap)
        self.assertEqual(self.shown_names(), ["Zoo", "file 9", "file 10"])
        sorts = [
            node.attributes.get("aria-sort") for node in self.browser.page.all("th", scope="col")
        ]
        self.assertEqual(sorts[:3], ["ascending", None, None])
        for column, names in (
            ("Size", ["file 9", "file 10", "Zoo"]),
            ("Changed (UTC)", ["file 10", "Zoo", "file 9"]),
        ):
            self.browser.open(self.browser.link(column))
            self.check_page()
            self.assertEqual(self.shown_names(), names)
            [shown] = [
                node for node in self.browser.page.all("th") if "aria-sort" in node.attributes
            ]
            self.assertEqual(shown.attributes["aria-sort"], "descending")
            self.browser.open(next(shown.all("a")).attributes["href"])
            self.assertEqual(self.shown_names(), names[::-1])

    def test_wrong_arguments(self) -> None:
        """An order or place that does not exist is that of the first page."""
        cap = self.directory_of({"a": LIT})
        for query in (
            "sort=x&order=y&from=z",
            "from=-1",
            "from=99999999999999",
            "from=5",
            "done=x",
        ):
            self.show(cap, f"?{query}")
            self.assertEqual((self.shown_names(), self.browser.message), (["a"], ""))

    def test_empty(self) -> None:
        self.show(self.directory_of({}))
        self.assertIn("This directory is empty.", self.browser.text)

    def test_kinds(self) -> None:
        """What is known of each entry is shown; metadata that are none are not."""
        mutable = self.world.run(self.grid.create_mutable(b"x")).cap
        read_only = self.directory_of({}).readonly()
        children = {
            "a.png": (LIT, {"mtime": 1_700_000_000.5}),
            "future": FUTURE,
            "mutable": (mutable, {"mtime": "<b>", "tahoe": ["x"]}),
            "fixed": (
                self.immutable_of({"x": LIT}),
                {"mtime": 10**400, "tahoe": {"linkmotime": {}}},
            ),
            "ro": read_only,
        }
        self.show(self.directory_of(children))
        rows = {name: self.browser.row(name).text for name in ("a.png", "future")}
        self.assertEqual(
            rows["a.png"], "a.png 5 B 2023-11-14 22:13 image/png Download Share Change"
        )
        self.assertTrue(rows["future"].endswith("unknown Change"))
        self.assertIn("1 unknown", self.browser.page.one("caption").text)
        for name, note in (("mutable", "mutable"), ("fixed", "immutable"), ("ro", "read-only")):
            [row] = [
                row for row in self.browser.page.all("tr") if row.text.startswith(f"{name} {note}")
            ]
            self.assertNotIn("<", row.text)

    def test_read_only(self) -> None:
        """There are no forms, and no links to any; immutable directories say what they are."""
        for cap, word in (
            (self.directory_of({"a": LIT}).readonly(), "read-only"),
            (self.immutable_of({"a": LIT}), "immutable"),
        ):
            self.show(cap)
            self.assertEqual(list(self.browser.page.all("form")), [])
            self.assertNotIn("Change", self.browser.row("a").text)
            self.assertIn(word, self.browser.text)
            self.browser.open(f"/uri/{cap}/?t=rename-form&name=a")
            self.assertEqual(self.browser.answer.status, 403)
            self.check_page()

    def test_unreadable(self) -> None:
        """The page says so, in plain words, and how to get on."""
        cap = self.directory_of({"a": LIT})
        self.delete_shares(cap)
        self.show(cap)
        self.assertIn("This directory cannot be read.", self.browser.text)
        self.assertIn("UnrecoverableFileError", self.browser.text)
        self.assertEqual(list(self.browser.page.all("form")), [])

    def test_large(self) -> None:
        """Ten thousand entries are shown some at a time, in bounded time and bytes."""
        self.show(self.immutable_of({f"file {number}": LIT for number in range(10_000)}))
        seen = self.shown_names()
        self.assertEqual(seen[-1], f"file {PAGE_ROWS - 1}")
        self.assertIn("entries 1 to 200 of 10000", self.browser.page.one("caption").text)
        began_s = time.process_time()
        self.browser.follow("Next entries")
        self.assertLess(time.process_time() - began_s, 10.0)
        self.check_page()
        self.assertLess(len(self.browser.answer.body), 300_000)
        self.assertEqual(self.shown_names()[0], f"file {PAGE_ROWS}")
        self.browser.follow("Previous entries")
        self.assertEqual(self.shown_names(), seen)
        self.show(self.immutable_of({"a": LIT}), "?from=9900")

    def test_long_names(self) -> None:
        """A page of them is shorter, but not empty; all of them are on some page."""
        names = [f"{number:02}" + "\u3042" * 8000 for number in range(50)]
        self.show(self.directory_of(dict.fromkeys(names, LIT)))
        pages = 1
        seen = self.shown_names()
        self.assertLess(len(self.browser.answer.body), 40 * PAGE_NAME_CHARACTERS)
        while "Next entries" in self.browser.text:
            self.browser.follow("Next entries")
            seen += self.shown_names()
            pages += 1
        self.assertEqual([name[:2] for name in seen], [name[:2] for name in names])
        self.assertGreater(pages, 1)


class ChangeTests(DirectoryTestCase):
    def test_all_tasks(self) -> None:
        """New directory, upload, rename, move, add by cap, delete: each says that it was done."""
        cap = self.directory_of({})
        self.show(cap)
        for task, said in (
            (lambda b: b.submit("Make it", name="photos"), "The directory was made."),
            (lambda b: b.submit("Upload", ("a b.txt", b"one")), "The file was uploaded."),
            (lambda b: b.submit("Upload", ("x", b"two"), name="two"), "The file was uploaded."),
            (
                lambda b: b.submit("Add it", name="linked", uri=str(LIT)),
                "The capability has a name in this directory now.",
            ),
            (
                lambda b: b.follow("Change a b.txt").submit("Rename", to_name="one.txt"),
                "The entry has its new name.",
            ),
            (lambda b: b.follow("Change one.txt").submit("Move"), "The entry was moved."),
            (lambda b: b.follow("Change two").submit("Delete"), "The entry was deleted."),
        ):
            task(self.browser)
            self.assertEqual(self.browser.answer.status, 200, self.browser.text)
            self.check_page()
            self.assertEqual(self.browser.message, said)
        self.assertEqual(self.names_in(cap), ["linked", "photos"])
        self.browser.follow("photos").follow("Download one.txt")
        self.assertEqual(self.browser.answer.body, b"one")

    def content_of(self, cap: DirectoryCap, *names: str) -> bytes:
        """Return the content of a file by its path."""
        path = self.world.run(self.grid.directory(cap).list())
        for name in names[:-1]:
            inner = path[name].cap
            assert isinstance(inner, DirectoryCap)
            path = self.world.run(self.grid.directory(inner).list())
        found = path[names[-1]].cap
        assert found is not None
        return self.world.run(self.grid.read(found))

    def test_several_files(self) -> None:
        """Of any size, in one form; what is there already is named, and the rest is stored."""
        cap = self.directory_of({})
        self.show(cap)
        large = bytes(range(256)) * 1000
        files = [("a", b"one"), ("big", large), ("none", b""), ("more", large[1:]), ("z", b"end")]
        self.browser.submit("Upload all", *files)
        self.assertEqual(self.browser.message, "The files were uploaded.")
        self.check_page()
        for name, data in files:
            self.assertEqual(self.content_of(cap, name), data)
        self.assertEqual(self.site.space.used_bytes, 0)
        self.browser.submit("Upload all", ("z", b"new"), ("b", b"two"), ("a", b"new"))
        self.assertEqual(self.browser.answer.status, 409)
        self.check_page()
        self.assertIn(
            "2 of 3 files were not stored: a (there is a child of this name already), z (",
            self.browser.text,
        )
        self.assertEqual(self.content_of(cap, "a"), b"one")
        self.assertEqual(self.content_of(cap, "b"), b"two")
        self.browser.follow("Go back")
        self.browser.check("Upload all", "replace").submit("Upload all", ("a", b"new"), ("c", b""))
        self.assertEqual(self.content_of(cap, "a"), b"new")
        self.browser.submit("Upload all", ("", b""))  # nothing was chosen
        self.assertIn("The form has no file; choose one", self.browser.text)

    def test_a_folder(self) -> None:
        """A browser sends paths as names; directories are made, or added to."""
        there = self.directory_of({"old": LIT})
        cap = self.directory_of({"there": there, "file": LIT})
        self.show(cap)
        files = [
            ("top/a b%2F.txt", b"one"),
            ("top/deep/deeper/x", b"x" * 100_000),
            ("top/deep/y", b"y"),
            ("there/new", b"new"),
            ("file/inside", b"lost"),
        ]
        self.browser.submit("Upload all", *files)
        self.assertIn("1 of 5 files were not stored: file/inside ('file'", self.browser.text)
        for name, data in files[:-1]:
            self.assertEqual(self.content_of(cap, *name.split("/")), data)
        self.assertEqual(self.names_in(there), ["new", "old"])
        self.show(cap)
        self.browser.submit("Upload all", ("one/file", b"1"))
        self.assertEqual(self.browser.message, "The files were uploaded.")
        self.assertEqual(self.names_in(cap), ["file", "one", "there", "top"])

    def test_a_directory_is_no_file(self) -> None:
        """A file never takes the place of a directory, whether that was there or comes from the same form."""
        inner = self.directory_of({"kept": LIT})
        cap = self.directory_of({"there": inner})
        self.show(cap)
        form = self.browser.check("Upload all", "replace")
        form.submit("Upload all", ("there", b"new"), ("other", b"1"))
        self.assertIn("1 of 2 files were not stored: there (", self.browser.text)
        self.assertEqual(self.names_in(inner), ["kept"])
        self.assertEqual(self.names_in(cap), ["other", "there"])
        self.show(cap)
        self.browser.submit("Upload all", ("a", b"1"), ("a/b", b"2"))
        self.assertIn("'a' is a file and a folder; nothing was stored", self.browser.text)
        self.show(cap)
        files = [(f"d/{'/'.join('x' * 90)}/{number}/f", b"") for number in range(12)]
        with mock.patch.object(form_upload, "MAX_FOLDERS", 100):
            self.browser.submit("Upload all", *files)
        self.assertIn("The form has more than 100 folders; send them in parts", self.browser.text)
        self.assertEqual(self.names_in(cap), ["other", "there"])

    def test_paths_that_lead_out(self) -> None:
        """They are refused before anything is stored."""
        cap = self.directory_of({})
        for bad in ("../x", "a/../x", "/x", "a//x", "a/", "./x", "a/..", "n/" * 100 + "x"):
            self.show(cap)
            self.browser.submit("Upload all", ("fine", b"x"), (bad, b"x"))
            self.assertEqual(self.browser.answer.status, 400, bad)
            self.assertIn("is not a path of a file in a folder", self.browser.text)
        self.show(cap)
        self.browser.submit("Upload all", ("a/e\u0301", b"x"), ("a/\u00e9", b"x"))
        self.assertIn("The form has two files 'a/\u00e9'", self.browser.text)
        self.assertEqual(self.names_in(cap), [])

    def test_many_files(self) -> None:
        """They take one open file; too many are refused, as are names without end."""
        cap = self.directory_of({})
        self.show(cap)
        before = len(os.listdir("/proc/self/fd"))
        held: list[int] = []
        put = self.grid.put

        def note(*given: Any, **options: Any) -> Any:
            held.append(len(os.listdir("/proc/self/fd")) - before)
            return put(*given, **options)

        self.patch(self.grid, "put", note)
        self.browser.submit("Upload all", *((f"{n:03}", b"x" * 1500) for n in range(300)))
        self.assertEqual(len(self.names_in(cap)), 300)
        self.assertLess(max(held), 10)
        self.patch(form_body, "MAX_FILES", 50)
        self.site.limits = attrs.evolve(self.site.limits, form_bytes=100_000)
        for files in (
            [(f"n{n}", b"") for n in range(51)],
            [("n" * 4000 + f"{n}", b"") for n in range(40)],
        ):
            self.show(cap)
            self.browser.submit("Upload all", *files)
            self.assertEqual(self.browser.answer.status, 413)
        self.assertEqual(self.site.space.used_bytes, 0)
        self.assertEqual(len(self.names_in(cap)), 300)

    def test_move_up_and_by_cap(self) -> None:
        other = self.directory_of({})
        cap = self.directory_of({"inner": self.directory_of({"a": LIT, "b": LIT})})
        self.show(cap, "inner/")
        self.browser.follow("Change a")
        self.check_page()
        options = [node.text for node in self.browser.page.all("option")]
        self.assertEqual(options, ["One level up"])
        self.browser.submit("Move").follow("Change b").submit("Move there", to_dir=str(other))
        self.assertEqual(self.browser.message, "The entry was moved.")
        self.assertEqual((self.names_in(cap), self.names_in(other)), (["a", "inner"], ["b"]))

    def test_nothing_is_replaced_unasked(self) -> None:
        """A name that is taken is an error with a way back, for each form; the box allows it."""
        cap = self.directory_of({"a": LIT, "b": self.put(b"x" * 100)})
        before = self.world.run(self.grid.directory(cap).list())
        for task in (
            lambda b: b.submit("Make it", name="a"),
            lambda b: b.submit("Upload", ("a", b"new")),
            lambda b: b.submit("Add it", name="a", uri="URI:LIT:mfrgg"),
            lambda b: b.follow("Change b").submit("Rename", to_name="a"),
        ):
            self.show(cap)
            task(self.browser)
            self.assertEqual(self.browser.answer.status, 409)
            self.check_page()
            self.browser.follow("Go back")
            self.assertEqual(self.shown_names(), ["a", "b"])
        self.assertEqual(self.world.run(self.grid.directory(cap).list()), before)
        self.browser.check("Upload", "replace").submit("Upload", ("a", b"new"))
        self.browser.follow("Download a")
        self.assertEqual(self.browser.answer.body, b"new")

    def test_odd_names(self) -> None:
        """Each is shown so that it deceives no reader and runs nothing; it is opened, renamed, deleted."""
        cap = self.directory_of(dict.fromkeys(ODD_NAMES, LIT))
        self.show(cap)
        self.assertEqual(sorted(self.shown_names()), sorted(ODD_NAMES.values()))
        self.assertEqual(len(list(self.browser.page.all("script"))), 1)
        for name, shown in ODD_NAMES.items():
            self.show(cap)
            row = self.browser.row(shown)
            self.browser.open(next(row.all("a")).attributes["href"])
            self.assertEqual(self.browser.answer.status, 200, name)
            self.check_page()
            self.show(cap)
            self.browser.open(
                next(self.browser.row(shown).all("a", href=self._last(row))).attributes["href"]
            )
            self.check_page()
            self.browser.submit("Rename", to_name="plain")
            self.assertEqual(self.browser.message, "The entry has its new name.", name)
            self.browser.follow("Change plain").submit("Delete")
            self.assertEqual(self.browser.message, "The entry was deleted.", name)
            self.assertNotIn(name, self.names_in(cap))
        self.assertEqual(self.names_in(cap), [])

    def _last(self, row: Node) -> str:
        return list(row.all("a"))[-1].attributes["href"]

    def test_odd_names_are_deleted(self) -> None:
        cap = self.directory_of(dict.fromkeys(ODD_NAMES, LIT))
        for shown in ODD_NAMES.values():
            self.show(cap)
            self.browser.open(self._last(self.browser.row(shown))).submit("Delete")
            self.assertEqual(self.browser.message, "The entry was deleted.")
        self.assertEqual(self.names_in(cap), [])

    def test_odd_names_are_moved(self) -> None:
        cap = self.directory_of({**dict.fromkeys(ODD_NAMES, LIT), "to": self.directory_of({})})
        for shown in ODD_NAMES.values():
            self.show(cap)
            self.browser.open(self._last(self.browser.row(shown))).submit("Move")
            self.assertEqual((self.browser.message, shown), ("The entry was moved.", shown))
        self.assertEqual(self.names_in(cap), ["to"])

    def test_missing_entry(self) -> None:
        self.show(self.directory_of({}))
        self.browser.open("?t=rename-form&name=%3Cb%3E")
        self.assertEqual(self.browser.answer.status, 404)
        self.check_page()

    def test_json_stays(self) -> None:
        """Programs get what they got."""
        cap = self.directory_of({"a": LIT})
        kind, said = json.loads(self.get(f"/uri/{cap}?t=json").body)
        self.assertEqual((kind, list(said["children"])), ("dirnode", ["a"]))
