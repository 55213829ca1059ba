"""Make the Python environment of a script once, then run the script inside it.

Rules of this file: standard library only, and nothing that Python 3.8 cannot parse, here and in the scripts, so that a
wrong interpreter ends with a sentence and not with a syntax error.

`enter("run")` looks for an environment built from `requirements/run.lock`, in the checkout (`.venv-run/`) or, where the
checkout cannot be written, in the user's cache folder. An environment is named after the Python it was made with and
the digest of its lock, so a changed lock makes a new one and an unchanged lock never does. Builders hold an exclusive
lock on the environment and users a shared one for as long as their process lives: two scripts may start at once, and
an environment in use is never removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
COMPLETE = "complete"


def enter(name: str) -> pathlib.Path:
    """Return inside the environment of `requirements/NAME.lock`, starting the script again there if need be.

    The result is a folder for caches that this user may write in. `ROOT` is first on the module path, in this process
    and in its children.
    """
    python = find_python()
    if python != sys.executable:
        os.execv(python, [python, *sys.argv])
    key = environment_key(name)
    places = candidate_folders(name)
    if any(os.path.realpath(sys.prefix) == os.path.realpath(place / key) for place in places):
        sys.path.insert(0, str(ROOT))
        return next(place / "cache" for place in places if make_folder(place))
    for place in places:
        if usable(place, key):
            restart(place, key, share(place, key))
    for place in places:
        if make_folder(place):
            if place != places[0]:
                say(f"the checkout is not writable for this user; the environment is in {place}")
            restart(place, key, build(name, place, key))
    sys.exit("no folder to make an environment in; tried: " + ", ".join(str(place) for place in places))


def find_python() -> str:
    """The running Python if its version fits, else the newest fitting one on the path."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return sys.executable
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found and subprocess.call([found, "-c", "import venv"], stderr=subprocess.DEVNULL) == 0:
            return found
    running = ".".join(str(part) for part in sys.version_info[:2])
    sys.exit(f"this needs Python 3.11, 3.12 or 3.13, and found only {running}; on Debian: apt-get install python3")


def environment_key(name: str) -> str:
    """Python version, and the digest of everything that decides the environment's content."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    identity = [version, platform.system(), platform.machine(), sys.base_prefix]
    lock = (ROOT / f"requirements/{name}.lock").read_bytes()
    digest = hashlib.sha256("\n".join(identity).encode() + b"\n" + lock).hexdigest()
    return f"{version}-{digest[:16]}"


def candidate_folders(name: str) -> list[pathlib.Path]:
    """Where environments may live, best first: the checkout, the user's cache, the user's own temporary folder."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    temporary = pathlib.Path(tempfile.gettempdir()) / f"hermes-reconciler-{os.getuid()}"
    return [ROOT / f".venv-{name}", cache / "hermes-reconciler" / name, temporary / name]


def usable(place: pathlib.Path, key: str) -> bool:
    """A finished environment whose Python this user may start; outside the checkout it must be the user's own."""
    ours = ROOT in place.parents or (os.path.isdir(place) and os.stat(place).st_uid == os.getuid())
    return ours and os.path.isfile(place / key / COMPLETE) and os.access(place / key / "bin" / "python", os.X_OK)


def make_folder(place: pathlib.Path) -> bool:
    """Make the folder if it is absent; True if this user may write in it and, outside the checkout, nobody else may."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        if ROOT not in place.parents:
            place.parent.chmod(0o700)  # refused if another user was first, as anybody may be in a temporary folder
    except OSError:
        return False
    return os.access(place, os.W_OK) and not place.parent.is_symlink()


def build(name: str, place: pathlib.Path, key: str) -> int:
    """Make the environment under an exclusive lock, unless another process was faster; returns the shared lock."""
    while True:
        held = share(place, key)
        if usable(place, key):
            return held
        fcntl.flock(held, fcntl.LOCK_EX)  # a shared lock turned exclusive may let another builder in first
        if not usable(place, key):
            install(name, place / key)
            remove_unused(place, key)
        os.close(held)


def install(name: str, folder: pathlib.Path) -> None:
    """Packages of the lock, checked by hash, from wheels alone; the file `complete` is written last."""
    lock = str(ROOT / f"requirements/{name}.lock")
    say(f"making the environment `{name}` once, in {folder}")
    shutil.rmtree(str(folder), ignore_errors=True)
    rules = ["--require-hashes", "--only-binary", ":all:", "-r", lock]
    python = str(folder / "bin" / "python")
    uv = shutil.which("uv")
    if uv and subprocess.call([uv, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        run([uv, "pip", "install", "-q", "--no-progress", "--python", python, *rules])
    else:
        if subprocess.call([sys.executable, "-c", "import ensurepip"], stderr=subprocess.DEVNULL) != 0:
            version = ".".join(str(part) for part in sys.version_info[:2])
            sys.exit(f"this Python has no ensurepip; on Debian: apt-get install python{version}-venv")
        run([sys.executable, "-m", "venv", str(folder)])
        run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input", *rules])
    (folder / COMPLETE).write_text(lock + "\n")


def remove_unused(place: pathlib.Path, keep: str) -> None:
    """Drop environments that this Python made from older locks, unless a living process is inside one."""
    for folder in place.glob(keep.split("-", maxsplit=1)[0] + "-*"):
        if folder.name != keep and folder.is_dir():
            held = share(place, folder.name)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(str(folder), ignore_errors=True)
            except BlockingIOError:
                say(f"left in place, still in use: {folder}")
            finally:
                os.close(held)


def share(place: pathlib.Path, key: str) -> int:
    """Hold the environment's lock together with its other users; waits while somebody builds."""
    path = str(place / f"{key}.lock")
    writable = os.access(str(place), os.W_OK)
    held = os.open(path, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another script that is making the same environment")
        fcntl.flock(held, fcntl.LOCK_SH)
    return held


def restart(place: pathlib.Path, key: str, held: int) -> None:
    """Run the script again with the environment's Python; the lock goes along and ends with the process."""
    os.set_inheritable(held, True)
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONNOUSERSITE="1")
    environment.pop("PYTHONHOME", None)
    environment["PATH"] = str(place / key / "bin") + os.pathsep + environment.get("PATH", os.defpath)
    python = str(place / key / "bin" / "python")
    script = str(pathlib.Path(sys.argv[0]).resolve())
    os.execve(python, [python, script, *sys.argv[1:]], environment)


def run(command: list[str]) -> None:
    """Run one command of the installation, its words on standard error; a failure ends the script."""
    if subprocess.call(command, stdout=sys.stderr) != 0:
        sys.exit("failed: " + " ".join(command))


def say(words: str) -> None:
    """Tell the person at the terminal; standard output stays the script's own."""
    print(words, file=sys.stderr, flush=True)
