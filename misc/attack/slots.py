"""Mutable shares without number, each a file, up to 256 in one request."""

from __future__ import annotations

from misc.attack.insiders import lines, slot_path, writer
from misc.attack.target import Target, again_and_again, from_command_line
from pipegrid.wire import gbs_mutable
from pipegrid.wire.storage_messages import ShareChange


def attack(target: Target) -> None:
    """Make shares, and write over all of a slot's in one step."""
    changes = {number: ShareChange((), ((0, b"x"),)) for number in range(256)}
    body = gbs_mutable.pack_request(changes, [])
    with lines(target, 4) as line:
        for turn in again_and_again(target, 0.02):
            path = slot_path((turn // 2 % 20).to_bytes(16, "big"))
            line.send([target.requests.request("POST", path, *writer(), body=body)])


if __name__ == "__main__":
    attack(from_command_line(__doc__))
