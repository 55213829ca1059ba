"""A command that restarts a provider which lives in the test's own process: it knocks, the test restarts, it ends."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_KNOCK = "import socket, sys; sys.exit(socket.create_connection(('127.0.0.1', {port})).recv(4) != b'done')"


class RestartDoor:
    """Listens while the block runs; each knock calls ``restart`` on a thread of the door."""

    def __init__(self, restart: Callable[[], None]) -> None:
        self._restart = restart
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.knocks = 0

    @property
    def command(self) -> str:
        """The command line; it ends with 0 once the restart is done."""
        return f'{sys.executable} -c "{_KNOCK.format(port=self._listener.getsockname()[1])}"'

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._restart()
                self.knocks += 1
                connection.sendall(b"done")
