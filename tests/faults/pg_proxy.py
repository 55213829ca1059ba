"""A proxy for PostgreSQL that reads the wire protocol and fails where it is told to.

Connections are known by their `application_name`. Points of a connection: `connect` (its first message), `call` (the
bind of an append), `sync` (the end of that call, after which the server commits by itself), `row` (the function's
answer, before the commit), `commit` (ready for the next query: committed), `notify`. What can be done at a point:

    cut     the message is lost and the connection gone      pass_cut  the message passes, then the connection is gone
    freeze  nothing passes any more, in either direction     drop      this message alone is lost
    delay   the message waits for `seconds`                  warn      a warning that no standby has it goes first
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from psycopg.conninfo import conninfo_to_dict, make_conninfo

WARNING = b"SWARNING\0VWARNING\0C01000\0Mcanceling wait for synchronous replication\0\0"


@dataclass
class Rule:
    """One fault: at which point of which connections, what, and how often (-1: for ever)."""

    application: str
    point: str
    action: str
    times: int = 1
    seconds: float = 0.0
    holding: bytes = b""


@dataclass(eq=False)
class Link:
    """One proxied connection."""

    client: socket.socket
    server: socket.socket
    application: str = ""
    in_call: bool = False
    call: bytes = b""
    frozen: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)

    def cut(self) -> None:
        """Both sides see the connection end."""
        self.gone.set()
        for side in (self.client, self.server):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


class PgProxy:
    """Use as a context manager; `dsn` leads through the proxy. `counts` says how often each point was met."""

    def __init__(self, dsn: str) -> None:
        parts = conninfo_to_dict(dsn)
        self._upstream = f"{parts['host']}/.s.PGSQL.{parts.get('port', 5432)}"
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")
        self.counts: dict[tuple[str, str], int] = {}
        self.refusing = False
        self._rules: list[Rule] = []
        self._links: list[Link] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> PgProxy:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()
        for thread in self._threads:
            thread.join()
        for link in self._links:
            link.client.close()
            link.server.close()

    def add(
        self, application: str, point: str, action: str, *, times: int = 1, seconds: float = 0.0, holding: bytes = b""
    ) -> Rule:
        """Arrange a fault; with `holding`, for appends that hold these bytes alone."""
        rule = Rule(application, point, action, times, seconds, holding)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """No more faults; connections that are frozen now are cut."""
        with self._lock:
            self._rules.clear()
            frozen = [link for link in self._links if link.frozen.is_set()]
        for link in frozen:
            link.cut()

    def cut_all(self, application: str | None = None) -> None:
        """End connections now."""
        for link in list(self._links):
            if application in (None, link.application):
                link.cut()

    def freeze_all(self, application: str) -> None:
        """Let nothing pass on connections that are open now."""
        for link in list(self._links):
            if link.application == application:
                link.frozen.set()

    def _spawn(self, call: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=call, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._upstream)
            except OSError:
                client.close()
                server.close()
                continue
            link = Link(client, server)
            self._links.append(link)
            self._spawn(self._from_client, link)
            self._spawn(self._from_server, link)

    def _from_client(self, link: Link) -> None:
        with suppress(OSError, EOFError, struct.error):
            size = _read(link.client, 4)
            body = _read(link.client, struct.unpack(">i", size)[0] - 4)
            fields = body[4:].split(b"\0")
            link.application = dict(zip(fields[::2], fields[1::2], strict=False)).get(b"application_name", b"").decode()
            self._pass(link, "connect", link.server, size + body)
            while True:
                kind, body = _message(link.client)
                point = ""
                if kind == b"B" and body[4:].startswith(b"\0append\0"):
                    link.in_call, link.call, point = True, body, "call"
                elif kind == b"S" and link.in_call:
                    point = "sync"
                self._pass(link, point, link.server, kind + body)
        link.cut()

    def _from_server(self, link: Link) -> None:
        with suppress(OSError, EOFError, struct.error):
            while True:
                kind, body = _message(link.server)
                point = ""
                if link.in_call and kind == b"D":
                    point = "row"
                elif link.in_call and kind == b"Z":
                    point, link.in_call = "commit", False
                elif kind == b"A":
                    point = "notify"
                self._pass(link, point, link.client, kind + body)
        link.cut()

    def _pass(self, link: Link, point: str, to: socket.socket, data: bytes) -> None:
        rule = self._rule(link, point) if point else None
        action = rule.action if rule else "pass"
        if action == "freeze":
            link.frozen.set()
        if link.frozen.is_set():
            link.gone.wait()
        if action == "cut":
            link.cut()
        if link.gone.is_set():
            raise EOFError
        if rule is not None and action == "delay":
            link.gone.wait(rule.seconds)
        if action == "warn":
            to.sendall(b"N" + struct.pack(">i", len(WARNING) + 4) + WARNING)
        if action != "drop":
            to.sendall(data)
        if action == "pass_cut":
            link.cut()

    def _rule(self, link: Link, point: str) -> Rule | None:
        with self._lock:
            key = (link.application, point)
            self.counts[key] = self.counts.get(key, 0) + 1
            for rule in self._rules:
                if (rule.application, rule.point) == key and rule.times != 0 and rule.holding in link.call:
                    rule.times -= 1
                    return rule
        return None


def _message(side: socket.socket) -> tuple[bytes, bytes]:
    head = _read(side, 5)
    size = head[1:]
    return head[:1], size + _read(side, struct.unpack(">i", size)[0] - 4)


def _read(side: socket.socket, size: int) -> bytes:
    parts = []
    while size > 0:
        part = side.recv(min(size, 65536))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
