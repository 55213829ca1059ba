"""Run as root: the promises once more, in a test session of an ordinary user."""

import os
import subprocess

import pytest

from tests.postgres.ordinary import PACKAGES, ROOT, USER, interpreter

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("module", ["test_supervisor.py", "test_without_root.py"])
def test_an_ordinary_user_gets_the_same_promises(module):
    python = interpreter()
    assert python is not None
    session = subprocess.run(
        [python, "-m", "pytest", "-q", f"tests/postgres/{module}"],
        cwd=ROOT,
        env={"PATH": os.defpath, "PYTHONPATH": PACKAGES, "PYTHONDONTWRITEBYTECODE": "1"},
        user=USER.uid,
        group=USER.gid,
        extra_groups=[],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert session.returncode == 0, session.stdout
    assert " passed" in session.stdout
