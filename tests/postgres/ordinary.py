"""An ordinary user for a root account's test run, and a Python that this user may run."""

import pwd
import shutil
import sys
import sysconfig
from pathlib import Path

from adapters.postgres_folders import Account, blocked_at

ROOT = Path(__file__).parents[2]
PACKAGES = sysconfig.get_path("purelib")
_entry = pwd.getpwnam("daemon")
USER = Account(_entry.pw_name, _entry.pw_uid, _entry.pw_gid)


def interpreter() -> str | None:
    """A Python of our version for the user; None where checkout, packages or every such Python are closed to it.

    The interpreter of a root account may lie in a folder closed to others; then the system's takes its place.
    """
    if blocked_at(USER, ROOT) or blocked_at(USER, Path(PACKAGES)):
        return None
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = (sys.executable, shutil.which(name, path="/usr/local/bin:/usr/bin"))
    return next((place for place in places if place and not blocked_at(USER, Path(place).resolve())), None)
