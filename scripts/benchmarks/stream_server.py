"""A provider of event streams in a process of its own, so little that it is never what limits a measure.

A run's id says everything of it: ``r-<group>-<frames>-<number>``, digits of fixed length. Its stream begins when its
group is released and writes each frame as an HTTP chunk of its own, as an agent does; ``GET /release/<group>/<rate>``
releases (frames per second for each stream; 0: as fast as it is read), ``GET /waiting/<group>/<streams>`` is answered
once so many wait.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import lru_cache

SLICE_FRAMES = 64
WORDS = ("every", "frame", "is", "kept", "in", "order", "and", "nobody", "hears", "what", "is", "not", "stored", "yet")


def run_id(group: int, frames: int, number: int) -> str:
    """A run of the server."""
    return f"r-{group:04}-{frames:05}-{number:04}"


@lru_cache(maxsize=16)
def template(frames: int) -> tuple[bytes, ...]:
    """The frames of a stream, the last one terminal, with a placeholder of the length of a run's id."""
    name = run_id(0, 0, 0)
    said = [f"{WORDS[place % len(WORDS)]} {place} " for place in range(frames - 1)]
    bodies = [
        {"event": "message.delta", "run_id": name, "timestamp": 1767225600.125 + place / 50, "delta": text}
        for place, text in enumerate(said)
    ]
    bodies.append({"event": "run.completed", "run_id": name, "timestamp": 1767225700.5, "output": "".join(said)})
    return tuple(f"data: {json.dumps(body)}\n\n".encode() for body in bodies)


def frames_of(name: str) -> list[bytes]:
    """The bytes of every frame of a run, in order."""
    frames = int(name.split("-")[2])
    return [frame.replace(run_id(0, 0, 0).encode(), name.encode()) for frame in template(frames)]


class Group:
    """Streams that begin together."""

    def __init__(self) -> None:
        self.waiting = 0
        self.changed = asyncio.Event()
        self.released = asyncio.Event()
        self.rate = 0.0


class StreamServer:
    """Status and events of any run, and the release of groups."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._ended: set[str] = set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request on a connection of its own."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            parts = head.split(b" ", 2)[1].decode().strip("/").split("/")
            if parts[-1] == "events":
                await self._stream(parts[2], writer)
            else:
                body = json.dumps(await self._value(parts)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n")
                writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # whoever read it left
        finally:
            writer.close()

    async def _value(self, parts: list[str]) -> object:
        if parts[0] == "release":
            group = self._group(int(parts[1]))
            group.rate = float(parts[2])
            group.released.set()
            return {}
        if parts[0] == "waiting":
            group = self._group(int(parts[1]))
            while group.waiting < int(parts[2]):
                group.changed.clear()
                await group.changed.wait()
            return {}
        if parts[1:2] != ["runs"]:
            return {}
        state = "completed" if parts[2] in self._ended else "running"
        return {"object": "hermes.run", "run_id": parts[2], "status": state}

    def _group(self, number: int) -> Group:
        return self._groups.setdefault(number, Group())

    async def _stream(self, name: str, writer: asyncio.StreamWriter) -> None:
        group = self._group(int(name.split("-")[1]))
        chunks = [b"%x\r\n%b\r\n" % (len(frame), frame) for frame in frames_of(name)]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        group.waiting += 1
        group.changed.set()
        await writer.drain()
        await group.released.wait()
        step = 1 if group.rate else SLICE_FRAMES
        began = asyncio.get_running_loop().time()
        for place in range(0, len(chunks), step):
            if group.rate:
                due = began + place / group.rate
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            writer.write(b"".join(chunks[place : place + step]))
            await writer.drain()
        self._ended.add(name)
        writer.write(b"0\r\n\r\n")


async def main() -> None:
    """Serve until the end of standard input; the port is the first line of output."""
    server = await asyncio.start_server(StreamServer().answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
