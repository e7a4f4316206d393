"""What ``--json`` prints, held against the table of docs/reference-cli.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipegrid.wire.announcements import make_signing_key
from tests.cli.processes import ProcessTestCase

REFERENCE = Path(__file__).parent.parent / "docs" / "reference-cli.md"
_ROW = re.compile(r"^\| ([^|]+) \| (.*) \|$", re.MULTILINE)


def documented() -> list[tuple[str, set[str]]]:
    """Return the first cell of each row of the table, and the fields that the second names."""
    text = REFERENCE.read_text(encoding="utf-8")
    table = text[text.index("| command | fields |") :].partition("\n\n")[0]
    return [(cell, set(re.findall(r"`([^`]+)`", fields))) for cell, fields in _ROW.findall(table)]


class JsonTests(ProcessTestCase):
    """Whoever writes a script finds each field in the table, with the command that prints it."""

    def objects(self, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
        """Run a command, and return what it prints, an object a line."""
        out, _ = self.run_command("--json", *arguments, status=status)
        return [json.loads(line) for line in out.splitlines()]

    def check(self, cell: str, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Hold objects against the row whose first cell is this, or begins so; returns the last one."""
        table = documented()
        rows = [fields for first, fields in table if first == cell]
        rows = rows or [fields for first, fields in table if first.startswith(cell)]
        self.assertEqual(len(rows), 1, cell)
        self.assertTrue(found, cell)
        for each in found:
            self.assertEqual(set(each) - rows[0], set(), cell)
        return found[-1]

    def test_files_and_directories(self) -> None:
        """What stores, fetches, lists and changes."""
        tree = self.home / "tree"
        tree.mkdir()
        (tree / "file").write_bytes(b"x" * 200)
        (tree / "link").symlink_to("file")
        self.check("`init`", self.objects("init", "--servers", "3"))
        stored = self.check("`put`, for each FILE", self.objects("put", "tree/file"))
        self.check("`put -r`", self.objects("put", "-r", "tree"))
        self.check("`mkdir`", self.objects("alias", "create", "home"))
        self.check("`mkdir`", self.objects("mkdir", "home:below"))
        self.check("`mkdir`", self.objects("alias", "list"))
        self.check("`put`, for each FILE", self.objects("put", "tree/file", "home:file"))
        self.check("`cp` to a grid", self.objects("cp", "-r", "tree", "home:"))
        self.check("`ln`", self.objects("mv", "home:file", "home:other"))
        self.check("`ls`", self.objects("ls", "-R", "home:"))
        self.check("`manifest`", self.objects("manifest", "home:"))
        self.check("`du`", self.objects("du", "home:"))
        self.check("`stats`", self.objects("stats", "home:"))
        self.check("`get` (with `-o`)", self.objects("get", stored["cap"], "-o", "back"))
        *each, last = self.objects("get", "-r", "home:tree", "-o", "all")
        self.check("`get -r`, for each", each)
        self.check("`get -r`, at the end", [last])
        for cap in (stored["cap"], "URI:LIT:me", *self.caps("home:")):
            found = self.check("`storage-index`", self.objects("storage-index", cap))
            self.assertLessEqual({"storage_index", "size", "required_shares"}, set(found))
        self.check("`encode`", self.objects("encode", "tree/file", "--shares", "shares"))
        decoded = self.objects("decode", stored["cap"], "shares", "-o", "decoded")
        self.check("`decode`", decoded)

    def test_grid_managers(self) -> None:
        """What certifies servers; a certificate and a configuration have the fields of their files."""
        where, key = ("grid-manager", "--config", "gm"), make_signing_key().public_text
        row = "`grid-manager` `create`"
        self.check(row, self.objects(*where, "create"))
        self.check(row, self.objects(*where, "public-identity"))
        self.check(row, self.objects(*where, "add", "a", key))
        signed = self.check("`grid-manager sign`", self.objects(*where, "sign", "a", "9"))
        self.check("`grid-manager list`", self.objects(*where, "list"))
        self.check(row, self.objects(*where, "remove", "a"))
        (self.home / "node").mkdir()
        (self.home / "node/node.pubkey").write_text(key)
        (self.home / "cert").write_text(json.dumps(signed))
        install = ("-d", "node", "grid-manager", "install", "cert")
        self.check("`grid-manager install`", self.objects(*install))

    def caps(self, alias: str) -> list[str]:
        """Return the cap of an alias."""
        return [each["cap"] for each in self.objects("alias", "list") if each["alias"] in alias]

    def test_upkeep_and_backups(self) -> None:
        """What looks after what is stored, and brings it back."""
        tree = self.home / "tree"
        tree.mkdir()
        (tree / "file").write_bytes(b"x" * 200)
        cap = self.objects("put", "tree/file")[-1]["cap"]
        self.check("`check`", self.objects("check", "--add-lease", cap))
        self.check("`renew`", self.objects("renew", cap))
        self.check("`repair`", self.objects("repair", cap))
        *each, last = self.objects("check", "-r", self.objects("put", "-r", "tree")[-1]["cap"])
        self.check("`check`", each)
        self.check("`check`, `repair`, `renew` of many caps", [last, last["summary"]])
        self.check("`status`, for each server", self.objects("status"))
        self.check("`backup --dry-run`", self.objects("backup", "--dry-run", "tree"))
        self.check("`put -r`", self.objects("backup", "tree"))
        self.check("`backups`", self.objects("backups"))
        *each, last = self.objects("restore", "-o", "restored")
        self.check("`get -r`, for each", each)
        self.check("`get -r`, at the end", [last])
        (tree / "file").write_bytes(b"y" * 300)
        (self.home / "restored/extra").write_bytes(b"")
        self.objects("backup", "tree")
        options = ("restore", "-o", "restored", "--delete", "-f")
        self.check("`restore --dry-run`", self.objects(*options, "--dry-run"))
        removed = [each for each in self.objects(*options, "--yes") if "local" in each]
        self.check("`restore --delete`", removed)
        self.check("`find`", self.objects("find", "file"))
        first = self.objects("backups")[0]["path"]
        *each, last = self.objects("diff", first, "latest", status=1)
        self.check("`diff`, for each", each)
        self.check("`diff`, at the end", [last])
        failed = self.objects("put", "nothing", "tree/file", status=1)[:1]
        self.check("any command on several files", failed)
