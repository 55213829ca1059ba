"""Admission as callers get it, beside the library, beside itself while the table is vacuumed, and through HTTP.

An admission is everything that `Intake.submit` does: rights, validation, fingerprint, sealing of what was given, and
one commit of the key's reservation and the Action. The Actions are not driven and no view follows, so that only the
admission is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager

import anyio
import msgspec
import psycopg
from anyio.from_thread import BlockingPortal, start_blocking_portal
from benchmarks.journal import CALLERS, library, library_saves, vacuumed
from benchmarks.stand import ENDPOINT, WHO, Host, host
from benchmarks.table import Benchmark, Measure, World
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from adapters.http import PublicApp
from adapters.http_server import serve
from adapters.submission import Submission
from domain.values import Mode

CAPABILITY = f"cap:hermes_agent:{ENDPOINT}:run_start"
PROMPT = "Summarise the open incidents of this week and say who works on them. " * 2


class Load:
    """Callers of one host, each asking again as soon as it is answered."""

    def __init__(self, host: Host) -> None:
        self._host, self._numbers = host, 0

    def stored(self) -> int:
        """How many admissions were asked for so far, all of them answered."""
        return self._numbers

    def admit(self, seconds: float, callers: int = CALLERS) -> float:
        """New keys admitted in a second."""
        return self._host.portal.call(_rate, self._admit, seconds, callers)

    def repeat(self, seconds: float, callers: int) -> float:
        """Repeats of known keys answered in a second."""
        self._host.portal.call(self._admit_known)
        return self._host.portal.call(_rate, self._repeat, seconds, callers)

    async def _admit(self) -> None:
        self._numbers += 1
        admitted = await self._host.intake.submit(WHO, submission(f"key-{self._numbers}"))
        if admitted.replay:
            raise RuntimeError("not what this measures: a repeat")

    async def _admit_known(self) -> None:
        for number in range(100):
            await self._host.intake.submit(WHO, submission(f"known-{number}"))

    async def _repeat(self) -> None:
        self._numbers += 1
        admitted = await self._host.intake.submit(WHO, submission(f"known-{self._numbers % 100}"))
        if not admitted.replay:
            raise RuntimeError("not what this measures: a new key")


def submission(key: str) -> Submission:
    """A start with a prompt of some words."""
    given = {"body": {"input": PROMPT, "instructions": "Answer briefly."}}
    return Submission(capability_id=CAPABILITY, input=given, idempotency_key=key, mode=Mode.ASYNC)


async def _rate(call: Callable[[], Awaitable[None]], seconds: float, callers: int) -> float:
    done = 0
    began = time.perf_counter()

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < began + seconds:
            await call()
            done += 1

    async with anyio.create_task_group() as group:
        for _ in range(callers):
            group.start_soon(caller)
    return done / (time.perf_counter() - began)


@contextmanager
def load(dsn: str) -> Iterator[Load]:
    """A load on a host of its own."""
    with host(dsn) as running:
        yield Load(running)


@contextmanager
def beside_library(world: World) -> Iterator[tuple[Measure, Measure]]:
    """The library's application, one `save()` of two events for each caller in a thread of its own."""
    with load(world.database()) as ours, library(world.database()) as theirs:
        yield ours.admit, theirs


@contextmanager
def while_vacuumed(world: World) -> Iterator[tuple[Measure, Measure]]:
    """The same two, each while its own table is vacuumed again and again."""
    dsns = [world.database(), world.database()]
    with load(dsns[0]) as ours, library(dsns[1]) as theirs:
        yield vacuumed(dsns[0], ours.admit), vacuumed(dsns[1], theirs)


@contextmanager
def repeats(world: World) -> Iterator[tuple[Measure, Measure]]:
    """Known keys against new ones, 16 callers each."""
    with load(world.database()) as ours:
        yield lambda seconds: ours.repeat(seconds, 16), lambda seconds: ours.admit(seconds, 16)


@contextmanager
def wal(world: World) -> Iterator[tuple[Measure, None]]:
    """Bytes of write-ahead log for each admission; nothing else writes meanwhile."""
    dsn = world.database()
    with load(dsn) as ours, psycopg.connect(dsn, autocommit=True) as connection:

        def position() -> int:
            found = connection.execute("select pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
            return int(found[0]) if found else 0

        def run(seconds: float) -> float:
            ours.admit(0.3)
            connection.execute("checkpoint")
            ours.admit(0.3)  # pages are written whole once after a checkpoint
            began, stored = position(), ours.stored()
            ours.admit(seconds)
            return (position() - began) / (ours.stored() - stored)

        yield run, None


# ---- through HTTP ----------------------------------------------------------------------------------------------------


async def _requests(port: int, prefix: str, seconds: float) -> int:
    """Requests answered with 202 on so many connections that are kept; every one has a key of its own."""
    body = json.dumps(msgspec.to_builtins(submission("")))
    done = 0
    began = time.perf_counter()

    async def connection(number: int) -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        count = 0
        while time.perf_counter() < began + seconds:
            count += 1
            content = body.replace('"idempotency_key": ""', f'"idempotency_key": "{prefix}-{number}-{count}"').encode()
            head = (
                f"POST /aip/v1/actions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer bench\r\n"
                f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
            )
            writer.write(head.encode() + content)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", answer.lower())
            await reader.readexactly(int(length[1]) if length else 0)
            if not answer.startswith(b"HTTP/1.1 202"):
                raise RuntimeError(f"not what this measures: {answer[:40]!r}")
            done += 1
        writer.close()

    await asyncio.gather(*map(connection, range(CALLERS)))
    return done


def client(port: int, prefix: str, seconds: float) -> float:
    """The clients of one measure, in a process of their own."""
    began = time.perf_counter()
    return asyncio.run(_requests(port, prefix, seconds)) / (time.perf_counter() - began)


@contextmanager
def served(portal: BlockingPortal, app: ASGIApp, clients: ProcessPoolExecutor) -> Iterator[Measure]:
    """Requests in a second at this application behind the host's own server."""
    names = itertools.count()
    task, port = portal.start_task(serve, app, "127.0.0.1", 0)

    def run(seconds: float) -> float:
        return clients.submit(client, port, f"{port}-{next(names)}", seconds).result()

    try:
        yield run
    finally:
        task.cancel()


@contextmanager
def through_http(world: World, library_save: bool) -> Iterator[tuple[Measure, Measure]]:
    """Admission through HTTP against the same route without storage, or with one library save for each request."""
    with ExitStack() as stack:
        clients = stack.enter_context(ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")))
        ours = stack.enter_context(host(world.database()))
        if library_save:
            save = stack.enter_context(library_saves(world.database()))
            other: ASGIApp = SaveRoute(save)
        else:
            other = PublicApp(stack.enter_context(host(None)).ports)
        yield (
            stack.enter_context(served(ours.portal, PublicApp(ours.ports), clients)),
            stack.enter_context(served(stack.enter_context(start_blocking_portal()), other, clients)),
        )


class SaveRoute:
    """A route that reads JSON and stores it by the library, in a thread for each request."""

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._threads = anyio.CapacityLimiter(CALLERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        await Request(scope, receive).json()
        await anyio.to_thread.run_sync(self._save, limiter=self._threads)
        await JSONResponse({"ack": {"status": "queued"}}, 202)(scope, receive, send)


BENCHMARKS = [
    Benchmark("admission", "admission, 64 callers", "library save() of 2 events, 64 threads", 20, beside_library, 30),
    Benchmark("admission-vacuum", "the same while VACUUM runs", "the same", 15, while_vacuumed, 30),
    Benchmark("repeats", "repeat of a known key, 16 callers", "admission of a new key", 0.5, repeats, 1.0),
    Benchmark(
        "http-library",
        "admission through HTTP, 64 connections",
        "a route with one library save() in a thread",
        10,
        lambda world: through_http(world, library_save=True),
        15,
    ),
    Benchmark(
        "http",
        "the same",
        "the same on a journal in memory",
        0.6,
        lambda world: through_http(world, library_save=False),
    ),
    Benchmark("wal", "write-ahead log for each admission", "", 1700, wal, unit="bytes", lower=True),
]
