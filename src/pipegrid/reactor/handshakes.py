"""
One handshake for a connection, and few requests for new keys after it: of servers, and of Foolscap.

In TLS 1.2 either side may ask for another handshake, which nobody here needs. In TLS 1.3 it may ask for new
keys: 27 bytes, for each of which OpenSSL derives keys and answers before anything else is read, forty in a
millisecond. GnuTLS asks by itself, once in 300 GB; most never do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from OpenSSL import SSL

MAX_KEY_UPDATES = 32

_DONE = 0x20  # SSL_CB_HANDSHAKE_DONE
_EXIT = 0x02  # SSL_CB_EXIT: what there was of a handshake, or of what comes after it, has been dealt with
_MAX_EXITS = 2 * MAX_KEY_UPDATES  # one for the question, and one for the answer


def bound_handshakes(context: SSL.Context) -> None:
    """Have connections of a context end, as after a goodbye, when the other side wants more than that."""
    from OpenSSL import SSL

    context.set_options(getattr(SSL, "OP_NO_RENEGOTIATION", 0))

    def happened(connection: Any, where: int, _: int) -> None:
        exits: int | None = getattr(connection, "pipegrid_exits", None)
        if where == _DONE:
            connection.pipegrid_exits = exits or 0
        elif exits is not None and where & _EXIT:
            connection.pipegrid_exits = exits + 1
            if exits > _MAX_EXITS:
                connection.set_shutdown(SSL.RECEIVED_SHUTDOWN)

    context.set_info_callback(happened)
