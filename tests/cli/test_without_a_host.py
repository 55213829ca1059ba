"""Commands that need no host: help, settings, and the life of `serve` itself."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from adapters.client import Api, CallFailed, NoAnswer
from adapters.conversation import Conversation, until
from adapters.credentials import bearer_key
from adapters.practice_hermes import Fault, PracticeHermes
from tests.host_process import COMMAND, ROOT, HostProcess, run

COMMANDS = [
    ("serve",), ("tour",), ("verify",),
    *(("actions", name) for name in ("list", "show", "submit", "result", "events", "cancel")),
    *(("runs", name) for name in ("list", "show", "events")),
    *(("approvals", name) for name in ("list", "show", "decide")),
    *(("recovery", name) for name in ("show", "explain", "needs-person")),
    ("audit", "events"),
    *(("settings", name) for name in ("show", "check")),
    *(("token", name) for name in ("new", "import")),
]  # fmt: skip
ENDPOINT = '[[endpoints]]\nid = "one"\nbase_url = "http://127.0.0.1:8642"\napi_key_file = "key"\n'


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_json(words: tuple[str, ...]) -> None:
    ran = run(*words, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert "--json" in ran.out
    assert " ".join(words) in ran.out.splitlines()[0]


def test_help_lists_every_command_and_costs_little() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    ran = run("--help")
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert ran.code == 0
    for name in {words[0] for words in COMMANDS}:
        assert f"  {name}: " in ran.out
    assert used < 0.6, "a heavy part is imported for the help"
    loaded = "import sys; sys.argv[1:] = ['--help']\nfrom adapters import cli\n"
    loaded += "try: cli.main()\nexcept SystemExit: pass\n"
    loaded += (
        "print(sorted({'psycopg', 'starlette', 'uvicorn', 'httpx', 'anyio', 'msgspec', 'ssl'} & set(sys.modules)))"
    )
    done = subprocess.run([COMMAND[0], "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_settings_are_checked_and_the_nearest_key_is_named(tmp_path: Path) -> None:
    config = tmp_path / "hermes-reconciler.toml"
    config.write_text("[public]\nprot = 1\n")
    wrong = run("settings", "check", cwd=tmp_path)
    assert (wrong.code, wrong.out) == (1, "")
    assert 'settings.invalid: unknown key "public.prot"; did you mean "port"?' in wrong.err
    assert run("settings", "check", "--json", cwd=tmp_path).json["error"]["code"] == "settings.invalid"
    config.write_text(ENDPOINT)
    missing = run("settings", "check", cwd=tmp_path)
    assert (missing.code, "settings.secret_file" in missing.err) == (1, True)
    (tmp_path / "key").write_text("a-key-of-some-length")
    (tmp_path / "key").chmod(0o600)
    good = run("settings", "check", cwd=tmp_path)
    assert (good.code, "ok  endpoint one: http://127.0.0.1:8642, with a key" in good.out) == (0, True)
    assert run("settings", "check", "--json", cwd=tmp_path).json["valid"] is True


def test_settings_are_shown_without_secrets(tmp_path: Path) -> None:
    environ = {"HERMES_RECONCILER_POSTGRES__DSN": "postgresql://u:hidden-word@db/x"}
    for words in (("settings", "show"), ("settings", "show", "--json")):
        ran = run(*words, environ=environ, cwd=tmp_path)
        assert (ran.code, "hidden-word" in ran.out + ran.err, "***" in ran.out) == (0, False, True)
    assert json.loads(ran.out)["public"]["port"] == 8790


def test_a_connection_that_breaks_is_told_by_what_may_have_happened() -> None:
    api = Api("http://127.0.0.1:9", None)
    with pytest.raises(NoAnswer) as nobody:
        api.post("/aip/v1/actions", {}, key="k")
    assert (nobody.value.code, nobody.value.unknown) == ("client.unreachable", False)
    with pytest.raises(ValueError, match="URL of a host"):
        Api("127.0.0.1:8790", None)


@pytest.mark.slow
@pytest.mark.postgres
def test_serve_tells_its_start_ends_on_sigterm_and_comes_back_with_the_same_tokens(tmp_path: Path) -> None:
    with HostProcess(tmp_path) as host:
        api = Api(host.operational, None)
        assert api.get("/ready").body["status"] == "ready"
        files = host.told[-1]["token_files"]
        tokens = {name: Path(file).read_text() for name, file in files.items()}
        assert host.end(signal.SIGTERM) == 0
        said = [told.get("progress", "") for told in host.told]
        assert said[-3:] == ["SIGTERM: ending", "draining: calls in hand end, nothing new is taken", "ended"]
        with pytest.raises(NoAnswer):
            api.get("/health")
        host.start()
        assert {name: Path(file).read_text() for name, file in files.items()} == tokens
        assert host.command("runs", "list").out == "No runs.\n"
        for text in tokens.values():
            assert text.strip() not in host.log + json.dumps(host.told)


@pytest.mark.slow
@pytest.mark.postgres
def test_serve_says_for_people_where_it_listens_where_tokens_are_and_what_to_try(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    words = [*COMMAND, "serve", "--state", str(tmp_path / "state"), "--public-port", "0", "--operational-port", "0"]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line.strip())
            if line.startswith("Ctrl-C"):
                break
        process.send_signal(signal.SIGINT)
        said += [line.strip() for line in process.stdout]
        assert process.wait(60) == 0
    listening = next(line for line in said if line.startswith("public "))
    assert "http://127.0.0.1:" in listening
    assert any(line.startswith("operational ") and "/ready" in line for line in said)
    tokens = next(line for line in said if line.startswith("tokens "))
    assert str(tmp_path / "state" / "admin-token") in tokens
    tries = said[said.index("Try:") + 1 : said.index("Try:") + 4]
    assert [line.split()[0] for line in tries] == ["curl", "scripts/run", "scripts/run"]
    assert said[-1] == "ended"


@pytest.mark.slow
@pytest.mark.postgres
def test_an_address_in_use_is_refused_by_name(tmp_path: Path) -> None:
    first = tmp_path / "one"
    first.mkdir()
    with HostProcess(first) as host:
        port = host.public.rpartition(":")[2]
        other = tmp_path / "two"
        other.mkdir(mode=0o711)
        ran = run("serve", "--state", str(other / "state"), "--public-port", port, "--operational-port", "0")
        assert ran.code == 1
        assert "settings.invalid: [public] 127.0.0.1 port" in ran.err
        assert host.command("runs", "list").code == 0


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.parametrize("signals", [1, 2])
def test_calls_in_hand_end_with_the_first_signal_and_break_off_with_the_second(tmp_path: Path, signals: int) -> None:
    with PracticeHermes() as hermes, HostProcess(tmp_path, hermes.base_url, hermes.key) as host:
        api = Api(host.public, bearer_key(host.state / "admin-token"))
        talk = Conversation(asker=api, approver=api, endpoint_id="practice")
        seconds = 2.0 if signals == 1 else 60.0
        hermes.fault(Fault(kind="delay", route="start", seconds=seconds))
        answers: list[dict[str, Any] | CallFailed] = []

        def ask() -> None:
            try:
                answers.append(talk.submit("run_start", {"body": {"input": "TEXT in hand"}}, "in-hand"))
            except CallFailed as error:
                answers.append(error)

        caller = threading.Thread(target=ask)
        caller.start()
        until(lambda: hermes.ledger().starts_received or None, "the start to arrive", 20)
        host.send(signal.SIGTERM)
        if signals == 1:
            assert host.end(signal.SIGCONT) == 0
        else:
            until(lambda: any("draining" in told.get("progress", "") for told in host.told) or None, "the drain", 20)
            assert host.end(signal.SIGTERM) == 130
        caller.join(20)
        (answer,) = answers
        if signals == 1:
            assert isinstance(answer, dict)
            assert answer["status"] == "completed"
        else:
            assert isinstance(answer, CallFailed)
            assert (answer.code, answer.unknown) == ("client.answer_lost", True)
        assert hermes.ledger().starts_received == 1
