"""The gateway's log as a WebSocket, for clients that have the token of its directory."""

from __future__ import annotations

import hmac
import json
import re
import traceback
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IPushProducer
from twisted.logger import ILogObserver, formatEvent, globalLogPublisher
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET
from wsproto.connection import Connection, ConnectionType
from wsproto.events import AcceptConnection, CloseConnection, Ping, TextMessage
from wsproto.handshake import H11Handshake
from wsproto.utilities import ProtocolError
from zope.interface import implementer

from pipegrid.gateway.http_response import HttpResponse, send

# Each message is a JSON object with one event. If a client reads too slowly, events are dropped and counted.
# Of messages from clients, only pings and the closing handshake are answered. ``wsproto`` holds the bytes of
# an unfinished frame only until it has the frame's head.
#
# The log should contain no caps; anything that looks like a cap is still removed here.

MAX_SOCKETS = 8
MAX_EVENT_CHARS = 16_384

_CAP = re.compile(r"URI:[A-Za-z0-9-]{2,20}:[A-Za-z0-9:]*")


def event_json(event: Any) -> str:
    """Return a log event as a JSON object on one line."""
    level = event.get("log_level")
    text = formatEvent(event)
    failure = event.get("log_failure")
    if failure is not None:
        text += "\n" + "".join(traceback.format_exception_only(failure.type, failure.value))
    text = _CAP.sub("URI:[CENSORED]", text[:MAX_EVENT_CHARS])
    return json.dumps(
        {
            "timestamp": event.get("log_time", 0.0),
            "level": getattr(level, "name", "info"),
            "message_type": str(event.get("log_namespace", ""))[:200],
            "message": text,
        }
    )


@implementer(IPushProducer)
class LogSocket:
    """
    One client that reads the log.

    Args:
        request: twisted.web's request, whose connection is used for the WebSocket.
        connection: the WebSocket protocol, after its handshake.
        closed: called once, when the client has disconnected.
    """

    def __init__(self, request: Any, connection: Connection, closed: Callable[[], object]) -> None:
        self._request = request
        self._transport = request.channel.transport
        self._connection = connection
        self._closed = closed
        self._paused = False
        self._left_out = 0
        self._is_open = True

    def begin(self) -> None:
        """Switch the connection from HTTP to the WebSocket."""
        self._request.notifyFinish().addBoth(self._gone)
        self._request.channel.setTimeout(None)
        self._request.channel.dataReceived = self.data_received
        self._request.registerProducer(self, True)

    def send_event(self, event: Any) -> None:
        """Send a log event; drop it if the client does not read."""
        if not self._is_open:
            return
        if self._paused:
            self._left_out += 1
            return
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            self._send(TextMessage(json.dumps({"left_out": left_out})))
        self._send(TextMessage(event_json(event)))

    def data_received(self, data: bytes) -> None:
        """Answer pings and the closing handshake; ignore other messages."""
        try:
            self._connection.receive_data(data)
            for event in self._connection.events():
                if isinstance(event, Ping):
                    self._send(event.response())
                elif isinstance(event, CloseConnection):
                    self._send(event.response())
                    self.close()
        except ProtocolError:
            self.close()

    def close(self) -> None:
        self._is_open = False
        self._transport.loseConnection()

    def _send(self, event: Any) -> None:
        self._transport.write(self._connection.send(event))

    def _gone(self, _result: Failure | None) -> None:
        self._is_open = False
        self._closed()

    def pauseProducing(self) -> None:
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False

    def stopProducing(self) -> None:
        self._is_open = False


@implementer(ILogObserver)
class PrivateResource(Resource):
    """
    The resource ``/private``: sends the log to clients that have the token.

    Args:
        token: returns the token.
    """

    isLeaf = True

    def __init__(self, token: Callable[[], str]) -> None:
        super().__init__()
        self._token = token
        self._sockets: dict[LogSocket, None] = {}

    def render(self, request: Any) -> int:
        refused = self._refusal(request)
        if refused is not None:
            send(request, refused)
        else:
            self._open(request)
        return NOT_DONE_YET

    def close(self) -> None:
        """Close the connections of all clients, since the gateway stops."""
        for socket in list(self._sockets):
            socket.close()

    def __call__(self, event: Any) -> None:
        """See ``ILogObserver``; send an event to all clients."""
        for socket in list(self._sockets):
            socket.send_event(event)

    def _refusal(self, request: Any) -> HttpResponse | None:
        if not self._is_authorized(request):
            return HttpResponse(
                "the token of private/api_auth_token is needed here\n",
                401,
                headers={"WWW-Authenticate": 'tahoe-lafs realm="tahoe-lafs"'},
            )
        if request.path.rstrip(b"/") == b"/private":
            return HttpResponse("request /private/logs/v1\n", 405, headers={"Allow": "HEAD"})
        if request.path != b"/private/logs/v1":
            return HttpResponse("there is nothing here; request /private/logs/v1\n", 404)
        upgrade = request.getHeader("upgrade") or ""
        if request.method != b"GET" or upgrade.lower() != "websocket":
            return HttpResponse("the log is a WebSocket; connect with a client for those\n", 200)
        if len(self._sockets) >= MAX_SOCKETS:
            return HttpResponse(f"{MAX_SOCKETS} clients read the log already\n", 503)
        return None

    def _is_authorized(self, request: Any) -> bool:
        token = self._token()
        given = (request.getHeader("authorization") or "").split(" ", 1)
        if len(given) != 2 or given[0].lower() != "tahoe-lafs" or not token:
            return False
        return hmac.compare_digest(given[1].strip().encode(), token.encode())

    def _open(self, request: Any) -> None:
        handshake = H11Handshake(ConnectionType.SERVER)
        raw = request.requestHeaders.getAllRawHeaders()
        try:
            handshake.initiate_upgrade_connection(
                [(name, value) for name, values in raw for value in values], request.path
            )
            answer = handshake.send(AcceptConnection())
        except ProtocolError:
            send(request, HttpResponse("this is not the handshake of a WebSocket\n", 400))
            return
        connection = handshake.connection
        assert connection is not None

        def closed() -> None:
            self._sockets.pop(socket, None)
            if not self._sockets:
                globalLogPublisher.removeObserver(self)

        socket = LogSocket(request, connection, closed)
        if not self._sockets:
            globalLogPublisher.addObserver(self)
        self._sockets[socket] = None
        request.channel.transport.write(answer)
        socket.begin()
