"""The tour as a command: every expectation of it is seen, within a minute, and nothing of it is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.host_process import run

pytestmark = [pytest.mark.slow, pytest.mark.postgres]


def commands_naming(word: str) -> list[str]:
    """Command lines of running processes that hold a word."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if word in line and int(folder.name) != os.getpid():
                found.append(line)
    return found


@pytest.mark.proves("A002", "A156")
def test_the_tour_sees_everything_it_expects_and_leaves_no_process(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    state = tmp_path / "tour"
    ran = run("tour", "--state", str(state), "--json", wait_s=110)
    assert ran.code == 0, ran.out + ran.err
    report = ran.json
    assert [check for check in report["checks"] if not check["seen"]] == []
    assert len(report["checks"]) >= 20
    assert report["seconds"] < 60
    assert report["ledger"]["requests"] == report["ledger"]["claimed"] == {"start": 6, "approval": 1, "stop": 1}
    assert report["views"]["lost_run"]["unknown_reason"] == "evidence_lost"
    assert report["views"]["explained"]["effect"] == "possible"
    assert {group["reason"] for group in report["views"]["recovery"]["groups"]} == {
        "outcome_unknown",
        "run_evidence_lost",
    }
    for scene in ("1. Start", "4. The provider", "6. The host is killed", "7. What the provider counted"):
        assert scene in ran.err
    assert commands_naming(str(state)) == []
    again = run("tour", "--state", str(state))
    assert (again.code, "is not empty" in again.err) == (2, True)


def test_the_tour_ends_with_the_views_for_people() -> None:
    ran = run("tour", wait_s=110)
    assert ran.code == 0, ran.out + ran.err
    assert ran.out.splitlines()[-1] == "Everything was as expected."
    for title in ("A run that completed:", "A run whose evidence is lost:", "Recovery:"):
        assert title in ran.out.splitlines()
