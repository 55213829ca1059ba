"""Callers that go on whatever dies: they start, repeat, approve and stop, and remember every answer they got."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from adapters.client import CallFailed, NoAnswer
from tests.process.site import HostProcess

Given = tuple[str, dict[str, Any]]


class Load:
    """`callers` threads on the hosts that `living` names at the moment; leaving the block ends them."""

    def __init__(self, living: Callable[[], list[HostProcess]], callers: int, seed: int) -> None:
        self._living, self._seed = living, seed
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(callers)]
        self._lock = threading.Lock()
        self.asked: dict[str, Given] = {}  #: what each key was used for
        self.told: dict[str, set[str]] = {}  #: the Actions that answered each key
        self.settled: dict[str, dict[str, Any]] = {}  #: the first settled answer of each Action
        self.changed: list[str] = []  #: settled answers that read otherwise later
        self.lost = self.refused = 0
        self.odd: list[str] = []  #: refusals that no caller deserves
        self._long: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def ask(self, host: HostProcess, key: str, operation: str, given: dict[str, Any]) -> dict[str, Any] | None:
        """One call; None where it was refused or not answered."""
        with self._lock:
            self.asked[key] = (operation, given)
        try:
            body = host.submit(operation, given, key)
        except NoAnswer:
            self.lost += 1
            return None
        except CallFailed as error:
            self.refused += 1
            if not error.error.get("retryable"):
                self.odd.append(f"{operation}: {error.code}")
            return None
        told: dict[str, Any] = body.get("action_result") or body["ack"]
        with self._lock:
            self.told.setdefault(key, set()).add(told["action_id"])
            if told.get("settled"):
                self._compare(told)
        return told

    def _compare(self, told: dict[str, Any]) -> None:
        """A settled answer is told in the same words for ever, the mark of a repeat aside."""
        told = told | {"output": {**(told.get("output") or {}), "idempotent_replay": None}}
        if self.settled.setdefault(told["action_id"], told) != told:
            self.changed.append(told["action_id"])

    def _call(self, number: int) -> None:
        chance = random.Random(self._seed * 100 + number)
        for turn in range(100_000):
            living = self._living()
            if self._over.is_set():
                return
            if not living:
                self._over.wait(0.05)
                continue
            try:
                self._one(chance, chance.choice(living), f"{number}-{turn}")
            except CallFailed:
                self.lost += 1
            self._over.wait(chance.random() * 0.4)

    def _one(self, chance: random.Random, host: HostProcess, key: str) -> None:
        lot = chance.random()
        with self._lock:
            known = chance.choice(sorted(self.asked)) if self.asked else ""
            long = chance.choice(self._long) if self._long else ""
        if lot < 0.35 and known:
            self.ask(host, known, *self.asked[known])
        elif lot < 0.5 and long:
            self.ask(host, key, "run_stop", {"run_id": long})
        elif lot < 0.6:
            self._approve(chance, host, key)
        else:
            prompt = "SLEEP 20" if lot > 0.9 else "TEXT done"
            told = self.ask(host, key, "run_start", {"body": {"input": f"for {key}\n{prompt}"}})
            if told and lot > 0.9 and told.get("settled") and told["status"] == "completed":
                self._long.append(told["output"]["run_id"])

    def _approve(self, chance: random.Random, host: HostProcess, key: str) -> None:
        """Start a run that asks, and answer it; every call of it may fail."""
        told = self.ask(host, key, "run_start", {"body": {"input": f"for {key}\nASK rm -rf /srv/{key}"}})
        if not told or told["status"] != "completed":
            return
        run_id = told["output"]["run_id"]
        for _ in range(20):
            pending = host.run(run_id).get("pending_approvals")
            if pending:
                break
            self._over.wait(0.1)
        else:
            return
        given = {"run_id": run_id, "choice": "once", "reviewed": pending[0]["digest"]}
        waiting = self.ask(host, f"{key}-choice", "run_approval", given)
        if waiting and waiting["status"] == "pending_approval":
            host.decide(waiting["output"]["approval_id"])
            if chance.random() < 0.5:
                host.decide(waiting["output"]["approval_id"])
