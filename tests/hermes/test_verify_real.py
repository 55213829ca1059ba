"""The verification with every permit, through a real host process, against the real Hermes Agent 0.19.0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.host_process import HostProcess
from tests.real_hermes import RealHermes
from tests.restart_door import RestartDoor
from tests.scripted_model import ScriptedModel

pytestmark = [pytest.mark.real_hermes, pytest.mark.slow, pytest.mark.timeout(420)]

RETENTION = {"status_retention": 6.0, "sweep_every": 0.5}


@pytest.mark.proves("A161", "A162", "A163", "A164", "A165", "A166", "A167", "A168", "A169")
def test_all_eight_checks_pass_on_the_real_agent(tmp_path: Path) -> None:
    record, guarded = tmp_path / "record.json", tmp_path / "guarded"
    guarded.mkdir()
    permits = ["--start-runs", "--start-prompt", "TEXT ready and done"]
    permits += ["--approval-prompt", f"TOOL rm -rf {guarded}\nTEXT done", "--retention", "--record", str(record)]
    with (
        ScriptedModel() as model,
        RealHermes(tmp_path / "home", model.base_url, times=RETENTION) as hermes,
        RestartDoor(hermes.restart) as door,
        HostProcess(tmp_path, hermes.base_url, hermes.key, endpoint_id="real") as host,
    ):
        ran = host.command("verify", *permits, "--restart-command", door.command, wait_s=300)
        assert (ran.code, ran.out.splitlines()[-1]) == (0, "All checks passed."), ran.out + ran.err
        assert hermes.key not in record.read_text() + ran.out + ran.err + host.log
    kept = json.loads(record.read_text())
    endpoint = kept["endpoints"][0]
    assert (endpoint["hermes_revision"], endpoint["endpoint_id"], endpoint["origin"]) == (
        "0.19.0",
        "real",
        hermes.base_url,
    )
    assert [check["result"] for check in endpoint["checks"]] == ["passed"] * 8
    assert endpoint["credential_revision"]
    assert guarded.exists(), "a command was carried out"
    assert door.knocks == 1
