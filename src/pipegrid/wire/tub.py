"""
Foolscap tubs that only call others: each of a new identity, which need not be known again.

Foolscap keeps at most one connection between two identities. So that two objects of ours do not push each
other out of one server, each has its own; and an identity that is in use elsewhere, such as that of a
Tahoe-LAFS node whose directory is read, would end the other's connections.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from foolscap.api import Tub

from pipegrid.wire.allowance import Bounds
from pipegrid.wire.broker import BoundedBroker
from pipegrid.wire.certificates import self_signed_pem
from pipegrid.wire.negotiation import BoundedNegotiation

KEEPALIVE_S = 60
"""After so much silence the other side is asked whether it is still there."""

_VALID = timedelta(days=3650)


def make_tub(lost_after_s: int, bounds: Bounds | None = None) -> Any:
    """
    Return a tub, not started.

    Args:
        lost_after_s: silence after which the other side is taken to be gone; more than ``KEEPALIVE_S``.
        bounds: on what it may send.
    """
    tub = Tub(certData=_make_pem())
    tub.negotiationClass = BoundedNegotiation
    tub.brokerClass = partial(BoundedBroker, bounds=bounds)
    tub.unsafeTracebacks = False
    tub.setOption("accept-gifts", False)
    tub.setOption("keepaliveTimeout", KEEPALIVE_S)
    tub.setOption("disconnectTimeout", lost_after_s)
    tub.setOption("logLocalFailures", False)
    tub.setOption("logRemoteFailures", False)
    return tub


def _make_pem() -> bytes:
    """Return a key and a certificate; on an elliptic curve, since an RSA key takes a tenth of a second."""
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    return self_signed_pem(key, "newpb_thingy", _VALID)  # as all tubs call themselves
