"""
Attacks on a storage server, each a program of its own, and what an honest client notices of them.

``make attack`` runs all of them (``__main__``), each against a new ``pipegrid serve`` process on loopback;
``measure`` says what must hold. An attack is a module that is run as

    python -m misc.attack.NAME --furl FURL --nurl NURL --directory SERVERDIR --seconds N

and goes on until its seconds are over (``target`` has what such programs have in common). Those that are
anybody use of the addresses nothing but host and port.
"""

from __future__ import annotations

import attrs

STRANGER = "anybody"
SECRET = "with the secret"


@attrs.frozen
class Attack:
    """
    One line of the table.

    Attributes:
        name: for ``--only``, and of the module, unless that is another.
        sentence: what it does.
        who: what it takes to do it.
        module: below ``misc.attack``.
        may_leave_files: in ``incoming``, because what it allocates is kept for its client, as it should be.
        serve: further options of the server's.
    """

    name: str
    sentence: str
    who: str = STRANGER
    module: str = attrs.field(
        default=attrs.Factory(lambda self: self.name, takes_self=True), kw_only=True
    )
    may_leave_files: int = attrs.field(default=0, kw_only=True)
    serve: tuple[str, ...] = attrs.field(default=(), kw_only=True)


ATTACKS: tuple[Attack, ...] = (
    Attack(
        "slow_bodies",
        "1000 PATCHes without a secret, each with 100 MB announced and a byte every 25 s",
    ),
    Attack(
        "half_open",
        "1000 connections that stop in the first 8 bytes, in TLS's handshake, in Foolscap's, or in a head",
    ),
    Attack("idle", "1000 connections that were refused a request and stay open"),
    Attack(
        "churn",
        "connections opened and closed as fast as they go from 8 addresses, with TLS handshakes and without",
    ),
    Attack(
        "floods",
        "300 connections from 8 addresses, with endless requests, headers, chunks, garbage; answers unread",
    ),
    Attack(
        "key_updates", "requests for new keys of TLS without end, the answers to which nobody reads"
    ),
    Attack(
        "handshakes",
        "handshakes of Foolscap and TLS as fast as they go, some bytes of each changed, from 8 addresses",
    ),
    Attack(
        "dribble",
        "writes of 1000 clients who know the secret, a byte every 5 s",
        SECRET,
        may_leave_files=10**6,
    ),
    Attack(
        "tiny_chunks",
        "writes of 1000 clients who know the secret, 120 KiB of each in chunks of two bytes",
        SECRET,
        may_leave_files=10**6,
    ),
    Attack("slow_readers", "250 GETs of 16 MB of which nobody reads the answers", SECRET),
    Attack("small_requests", "8 connections that ask 60 times a second each", SECRET),
    Attack("clients", "200 client processes at once, each with a share every 5 s", SECRET),
    Attack("foolscap_names", "Foolscap: names of 900 MiB are asked for"),
    Attack("foolscap_nonsense", "Foolscap: tokens without sense, bound or end, and silence"),
    Attack(
        "foolscap_floods", "Foolscap: PINGs and small calls without end, answers unread", SECRET
    ),
    Attack("foolscap_reads", "Foolscap: 1200 reads of 60 MiB that nobody reads", SECRET),
    Attack(
        "foolscap_writes", "Foolscap: writes of 120 MiB, to nobody, to one share, slowly", SECRET
    ),
    Attack("foolscap_references", "Foolscap: references taken and given, never let go", SECRET),
    Attack(
        "foolscap_vectors", "Foolscap: read-test-writes of many tiny, shared or deep parts", SECRET
    ),
    Attack(
        "cbor_elements",
        "messages of 8 MiB of one-byte elements, and the like in bundles and complaints",
        SECRET,
    ),
    Attack("leases", "leases of thousands of clients on 16 shares", SECRET),
    Attack(
        "allocations",
        "allocations of a byte, many times 4096, none of which is written",
        SECRET,
        may_leave_files=8192,
    ),
    Attack(
        "free_space",
        "allocations of all free space, a byte of which is written now and then",
        SECRET,
        may_leave_files=8192,
    ),
    Attack(
        "bundles",
        "bundles of as many allocations as there may be, and others that are cut off",
        SECRET,
        may_leave_files=8192,
    ),
    Attack("slots", "mutable shares, 256 new ones or changes in one request", SECRET),
    Attack(
        "vectors",
        "test and read vectors without number, and answers that are not taken",
        SECRET,
    ),
    Attack("ranges", "Range headers of thousands of ranges", SECRET),
    Attack("advisories", "complaints without number, 32 KiB each", SECRET),
)
