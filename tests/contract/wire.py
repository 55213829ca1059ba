"""The client of the provider suites: plain HTTP, a small reader of event streams, and waiting for conditions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio
import httpx

PATIENCE_SECONDS = 40.0
UNKNOWN_RUN = "run_" + "0" * 32


@dataclass(frozen=True)
class Differences:
    """Where two providers of the same behaviour may differ; times in seconds."""

    approval_timeout: float
    keepalive: float
    max_concurrent_runs: int
    tool_outlives_kill: bool  #: the real agent's tools are processes of their own


class Provider(Protocol):
    """A running provider under test."""

    differences: Differences
    folder: Path  #: where commands create and delete

    @property
    def base_url(self) -> str:
        """Address without a trailing slash."""

    @property
    def headers(self) -> dict[str, str]:
        """Header that authorises a request."""

    def kill(self) -> None:
        """SIGKILL."""

    def start(self) -> None:
        """Start again on the same home and address."""

    def prepare(self, path: Path) -> None:
        """Make something that a command can delete."""

    def carried_out(self, command: str) -> bool:
        """Whether the last path of this ``touch`` or ``rm`` command shows its effect."""


@dataclass
class Frame:
    """One event or one comment of a stream."""

    event: str
    data: dict[str, Any] = field(default_factory=dict)


def frames_of(raw: bytes) -> list[Frame]:
    """The whole frames in the bytes of a 0.19 stream; an unfinished last frame is left out."""
    found = []
    for block in raw.split(b"\n\n")[:-1]:
        if block.startswith(b": "):
            found.append(Frame(block.decode()))
        else:
            assert block.startswith(b"data: "), block
            assert b"\n" not in block, block
            data = json.loads(block[len(b"data: ") :])
            found.append(Frame(data["event"], data))
    return found


class Reader:
    """One open event stream and what came from it so far."""

    def __init__(self) -> None:
        self.status = 0
        self.headers = httpx.Headers()
        self.raw = b""
        self.ended = False
        self.news = anyio.Event()

    @property
    def frames(self) -> list[Frame]:
        return frames_of(self.raw)

    @property
    def names(self) -> list[str]:
        """Names of events and comments in order, without keepalives."""
        return [frame.event for frame in self.frames if frame.event != ": keepalive"]

    def only(self, event: str) -> Frame:
        """The single frame of this name."""
        (found,) = (frame for frame in self.frames if frame.event == event)
        return found

    def note(self) -> None:
        self.news.set()
        self.news = anyio.Event()

    async def until(self, holds: Callable[[Reader], bool]) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while not holds(self):
                await self.news.wait()

    async def sees(self, event: str, times: int = 1) -> None:
        await self.until(lambda reader: reader.names.count(event) >= times)

    async def ends(self) -> None:
        await self.until(lambda reader: reader.ended)


async def eventually(holds: Callable[[], Awaitable[bool]], every: float = 0.02) -> None:
    """Look again until the condition holds; TimeoutError when that takes too long."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            if await holds():
                return
            await anyio.sleep(every)


class Wire:
    """The client of the suite."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.http = httpx.AsyncClient(
            base_url=provider.base_url, headers=provider.headers, timeout=PATIENCE_SECONDS, trust_env=False
        )

    async def start(self, *lines: str, **more: Any) -> str:
        answer = await self.http.post("/v1/runs", json={"input": "\n".join(lines), **more})
        assert answer.status_code == 202, answer.text
        assert answer.json()["status"] == "started"
        run_id: str = answer.json()["run_id"]
        return run_id

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(path)

    async def status(self, run_id: str) -> dict[str, Any]:
        answer = await self.get(f"/v1/runs/{run_id}")
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def reaches(self, run_id: str, *statuses: str) -> dict[str, Any]:
        last: dict[str, Any] = {}

        async def reached() -> bool:
            last.update(await self.status(run_id))
            return last["status"] in statuses

        await eventually(reached)
        return last

    async def has(self, command: str) -> None:
        """Wait until a command shows its effect."""

        async def done() -> bool:
            return self.provider.carried_out(command)

        await eventually(done)

    async def decide(self, run_id: str, choice: str, **more: Any) -> httpx.Response:
        return await self.http.post(f"/v1/runs/{run_id}/approval", json={"choice": choice, **more})

    async def stop(self, run_id: str) -> httpx.Response:
        return await self.http.post(f"/v1/runs/{run_id}/stop")

    async def rows(self, session_id: str) -> list[dict[str, Any]]:
        answer = await self.get(f"/api/sessions/{session_id}/messages")
        return answer.json()["data"] if answer.status_code == 200 else []

    async def read(self, run_id: str, reader: Reader) -> None:
        """Bring a run's stream into the reader until it ends; cancelling closes the connection."""
        try:
            async with self.http.stream("GET", f"/v1/runs/{run_id}/events", headers=self.provider.headers) as answer:
                reader.status, reader.headers = answer.status_code, answer.headers
                reader.note()
                async for chunk in answer.aiter_raw():
                    reader.raw += chunk
                    reader.note()
        except httpx.RemoteProtocolError:
            reader.raw += b": connection lost\n\n"
        finally:
            reader.ended = True
            reader.note()

    @asynccontextmanager
    async def reading(self, run_id: str) -> AsyncIterator[Reader]:
        """A reader that is connected inside the block; leaving the block closes its connection."""
        reader = Reader()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.read, run_id, reader)
            await reader.until(lambda one: one.status != 0)
            yield reader
            tasks.cancel_scope.cancel()


def error_of(answer: httpx.Response) -> tuple[int, str | None]:
    """Status and code of a refusal in the JSON envelope."""
    error = answer.json()["error"]
    assert {"message", "type"} <= error.keys()
    return answer.status_code, error.get("code")


def deletion(provider: Provider, name: str) -> str:
    """A command that asks for approval, with something to delete."""
    provider.prepare(provider.folder / name)
    return f"rm -rf {provider.folder / name}"
