"""A client's connection, as uvicorn keeps it, with limits: how many there are, how long a request may take to come, and its answer to be
read.

uvicorn closes a connection that is idle behind an answer. One that never sends a request, or half of one, or does not read, it would keep
for ever.
"""

import asyncio
import json
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

from needlework.serve.refused import RefusedError

FILES = 64  # that the process has open beside its connections, and a few more


def most(wanted: int = 4096) -> int:
    """Connections: no more than the system lets the process have."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files - FILES))


class ClientConnection(H11Protocol):
    """most: connections at once; a further one gets 503. whole: seconds that a request has, headers and body, from the connection's
    beginning or its first byte behind an answer; 408. taken: seconds after which a client has to have made room for more of its answer."""

    most, whole, taken = most(), 60.0, 60.0
    _coming: asyncio.TimerHandle | None = None
    _going: asyncio.TimerHandle | None = None
    _begun = False  # a request has sent a byte, and is not whole

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyrefly: ignore[bad-override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            words = f"{len(self.connections) - 1} connections are open, as many as may be; try again"
            self._refuse(RefusedError(words, status=503, kind="server_error", code="too_many_connections"))
        else:
            self._coming = self.loop.call_later(self.whole, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._begun = True
        super().data_received(data)
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self._came()
        elif self._coming is None and not self.transport.is_closing():
            self._coming = self.loop.call_later(self.whole, self._late)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.cycle.more_body:
            self._begun = False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._going = self.loop.call_later(self.taken, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._going is not None:
            self._going.cancel()
            self._going = None

    def _came(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            self._coming = None

    def _late(self) -> None:
        """The connection ends; with an answer, if a request has begun and none is on its way."""
        self._coming, cycle = None, self.cycle
        # the cycle may be the last request's, which was answered: that of headers that have not come is not there
        answered = cycle is not None and cycle.response_started and (cycle.more_body or not cycle.response_complete)
        if self._begun and not answered:
            words = f"the request was not whole after {self.whole:g} s, expected its headers and body in that time"
            self._refuse(RefusedError(words, status=408, code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: RefusedError) -> None:
        body = json.dumps(error.body).encode()
        phrase = {408: "Request Timeout", 503: "Service Unavailable"}[error.status]
        head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        more = "retry-after: 1\r\n" if error.status == 503 else ""
        self.transport.write(f"{head}{more}\r\n".encode() + body)
        self.transport.close()
