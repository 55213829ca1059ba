"""The pictures of the transition tables show the tables as they are."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from domain import action, attempt, binding

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
TABLES = {"action.svg": action.NEXT, "attempt.svg": attempt.NEXT, "run.svg": binding.NEXT}


@pytest.fixture(scope="module")
def diagrams() -> Iterator[ModuleType]:
    """The script as a module: its file has no ending, and its own folder is where it finds its imports."""
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "scripts"))
    loader = importlib.machinery.SourceFileLoader("diagrams", str(ROOT / "scripts/diagrams"))
    spec = importlib.util.spec_from_loader("diagrams", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = writes
    yield module
    sys.path[:] = before


def test_no_kept_picture_is_stale(diagrams: ModuleType) -> None:
    assert diagrams.stale(diagrams.FOLDER) == []
    assert diagrams.main(["--check"]) == 0


@pytest.mark.parametrize("name", TABLES)
def test_a_picture_has_one_arrow_for_each_row_and_one_box_for_each_state(diagrams: ModuleType, name: str) -> None:
    table = TABLES[name]
    root = ET.fromstring(diagrams.pictures()[name])
    words = [element.text for element in root.iter(f"{SVG}text")]
    states = {state.value for state, _ in table} | {state.value for state in table.values()}
    assert [word for word in words if word in {kind.__name__ for _, kind in table}] == [
        kind.__name__ for _, kind in table
    ]
    assert states == {word.replace(" ", "_") for word in words if word and word.replace(" ", "_") in states}
    assert len(list(root.iter(f"{SVG}circle"))) == len(table)


def test_the_same_tables_give_the_same_bytes(diagrams: ModuleType) -> None:
    assert diagrams.pictures() == diagrams.pictures()


def test_a_changed_missing_or_foreign_picture_is_stale(
    diagrams: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagrams.main([], tmp_path) == 0
    (tmp_path / "action.svg").write_text("<svg/>")
    (tmp_path / "run.svg").unlink()
    (tmp_path / "other.svg").write_text("<svg/>")
    assert diagrams.main(["--check"], tmp_path) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "docs/diagrams/action.svg",
        "docs/diagrams/other.svg",
        "docs/diagrams/run.svg",
    ]


def test_an_unknown_argument_is_refused(diagrams: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert (diagrams.main(["--chek"]), diagrams.main(["--help"])) == (2, 0)
    assert "scripts/diagrams --check" in capsys.readouterr().out
