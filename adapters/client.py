"""A client of this host's own public interface, for the commands: JSON calls and event feeds on the standard library.

A mutation whose answer was lost has an unknown outcome: ``NoAnswer`` says so, and the same call with the same key may
be made again.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from adapters.credentials import Secret

WAIT_S = 340.0
LONGEST_ANSWER = 64 * 2**20
POSITION = "Journal-Position"


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: HTTP status, JSON object, and the journal position to wait for in a view (0: none)."""

    status: int
    body: dict[str, Any]
    position: int = 0


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One frame of a feed."""

    event: str
    data: dict[str, Any]
    id: str = ""


class CallFailed(Exception):
    """The call was refused or not answered; ``error`` is an error object as the interface tells them."""

    def __init__(self, error: Mapping[str, Any], status: int = 0) -> None:
        super().__init__(str(error.get("message", "")))
        self.error, self.status = dict(error), status

    @property
    def code(self) -> str:
        """The stable code."""
        return str(self.error.get("code", ""))

    @property
    def unknown(self) -> bool:
        """True if the call may have done what it asked for."""
        return self.error.get("effect") == "possible"


class NoAnswer(CallFailed):
    """No connection, or one that broke before the answer was complete."""


class Api:
    """Calls of one principal. A connection serves one call; nothing is repeated."""

    def __init__(self, url: str, token: Secret | None, *, wait_s: float = WAIT_S) -> None:
        """ValueError if ``url`` is not an http or https origin."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError("the URL of a host is http://NAME:PORT or https://NAME:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._token, self._wait_s = token, wait_s

    def get(self, path: str, **query: Any) -> Told:
        """Read; parameters that are None or empty are left out. CallFailed if refused."""
        return self._call("GET", path + _query(query), None, {})

    def post(self, path: str, body: Mapping[str, Any], *, key: str = "") -> Told:
        """Change something. CallFailed if refused; NoAnswer with effect ``possible`` if the answer was lost."""
        return self._call("POST", path, body, {"Idempotency-Key": key} if key else {})

    def follow(self, path: str, **query: Any) -> Iterator[Notice]:
        """The frames of a feed until it ends. CallFailed if it is refused, or ends with an error or a broken line."""
        connection, answer = self._open("GET", path + _query(query), None, {"Accept": "text/event-stream"})
        try:
            if answer.status != 200:
                raise self._refusal(answer.status, _object(answer.read(LONGEST_ANSWER)))
            yield from self._frames(answer)
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(self.url, sent=True, mutation=False) from error
        finally:
            connection.close()

    def _frames(self, answer: http.client.HTTPResponse) -> Iterator[Notice]:
        event, frame_id, data = "", "", ""
        for raw in answer:
            name, _, value = raw.decode("utf-8", "replace").rstrip("\r\n").partition(": ")
            if name == "event":
                event = value
            elif name == "id":
                frame_id = value
            elif name == "data":
                data += value
            elif not name and data:
                body = _object(data.encode())
                if event == "aip.error":
                    raise self._refusal(0, body)
                yield Notice(event=event, data=body, id=frame_id)
                event, frame_id, data = "", "", ""

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, headers: dict[str, str]) -> Told:
        connection, answer = self._open(method, path, body, headers)
        try:
            content = answer.read(LONGEST_ANSWER)
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(self.url, sent=True, mutation=method != "GET") from error
        finally:
            connection.close()
        told = _object(content)
        if answer.status >= 400 or not told:
            raise self._refusal(answer.status, told)
        position = answer.headers.get(POSITION, "0")
        return Told(status=answer.status, body=told, position=int(position) if position.isdecimal() else 0)

    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._wait_s)
        sent = False
        try:
            connection.connect()
            if connection.sock is not None:
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            headers = {"Accept": "application/json"} | headers
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token.reveal()}"
            content = None
            if body is not None:
                content, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
            sent = True
            connection.request(method, path, content, headers)
            return connection, connection.getresponse()
        except (OSError, ssl.SSLError, http.client.HTTPException) as error:
            connection.close()
            raise _no_answer(self.url, sent=sent, mutation=method != "GET") from error

    def _refusal(self, status: int, body: dict[str, Any]) -> CallFailed:
        error = body.get("error")
        if isinstance(error, dict) and error.get("code"):
            return CallFailed(error, status)
        message = f"{self.url} answered HTTP {status} without an error object; it may not be a hermes-reconciler host."
        return CallFailed(_error("client.not_understood", message, "none", retryable=False), status)


def segment(text: str) -> str:
    """An id as one segment of a path."""
    return quote(text, safe="")


def _query(members: Mapping[str, Any]) -> str:
    given = {name: _word(value) for name, value in members.items() if value not in (None, "", False)}
    return "?" + urlencode(given) if given else ""


def _word(value: Any) -> str:
    return "true" if value is True else str(value)


def _object(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _error(code: str, message: str, effect: str, *, retryable: bool) -> dict[str, Any]:
    return {"code": code, "message": message, "category": "transport", "retryable": retryable, "effect": effect}


def _no_answer(url: str, *, sent: bool, mutation: bool) -> NoAnswer:
    if not sent:
        return NoAnswer(_error("client.unreachable", f"No host answers at {url}.", "none", retryable=True))
    if mutation:
        message = f"{url} gave no complete answer; the request may have been accepted. Repeat it with the same key."
        return NoAnswer(_error("client.answer_lost", message, "possible", retryable=True))
    return NoAnswer(_error("client.answer_lost", f"{url} gave no complete answer.", "none", retryable=True))
