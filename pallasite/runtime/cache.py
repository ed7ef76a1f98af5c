"""Compiled code on disk: a bounded store of files named by a key.

`load(key)` and `store(key, payload)` are all that backends use. A file is trusted only
if it and its folder belong to the user, no one else may write them, and the hashes of
key and payload stored in it match; any other file is ignored, and removed if it is
ours. Files appear by an atomic rename, so processes may share the folder. Disk errors
only mean that code is compiled again.
"""

import contextlib
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pallasite import config

_MAGIC = b"pallasite object 1\n"
_HEADER = len(_MAGIC) + 32 + 32  # magic, hash of the key, hash of the payload
_SUFFIX = ".kernel"
_WRITING = "writing-"  # prefix of files not yet complete


@dataclass(frozen=True)
class Entry:
    """One file in the store."""

    path: Path
    size: int
    used: float  # seconds since the epoch


def folder() -> Path | None:
    """Where files go; None if the store is disabled or cannot be made safe."""
    said = config.get("cache_dir")
    if said.lower() in ("0", "off", "none") or config.get("cache_bytes") <= 0:
        return None
    if not hasattr(os, "geteuid"):
        return None  # the owner of a file cannot be determined here
    return Path(said).expanduser() if said else _user_folder()


def load(key: str) -> bytes | None:
    """The payload stored under a key; None if there is no trusted one."""
    place = folder()
    if place is None or not _is_private(place):
        return None
    path = _path(place, key)
    data = _read_own(path)
    if data is None:
        return None
    payload = _payload(key, data)
    with contextlib.suppress(OSError):
        if payload is None:
            path.unlink()
        else:
            os.utime(path)  # eviction is by least recent use
    return payload


def store(key: str, payload: bytes) -> None:
    """Store a payload, and evict old files if the store is too large."""
    place = folder()
    limit = config.get("cache_bytes")
    if place is None or _HEADER + len(payload) > limit:
        return
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(place):
            return
        data = _MAGIC + _digest(key.encode()) + _digest(payload) + payload
        _write_at_once(_path(place, key), data)
        _evict(place, limit, len(data))


def entries() -> list[Entry]:
    """The files of the store, least recently used first."""
    place = folder()
    if place is None:
        return []
    found = []
    for path in place.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            found.append(Entry(path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def clear() -> int:
    """Remove every file in the store; return how many there were."""
    removed = 0
    for entry in entries():
        with contextlib.suppress(OSError):
            entry.path.unlink()
            removed += 1
    place = folder()
    for path in place.glob(f"{_WRITING}*") if place else ():  # of writers that died
        with contextlib.suppress(OSError):
            path.unlink()
    return removed


def _user_folder() -> Path:
    if sys.platform == "darwin":
        return Path("~/Library/Caches/pallasite").expanduser()
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "pallasite"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _path(place: Path, key: str) -> Path:
    return place / (_digest(key.encode()).hex() + _SUFFIX)


def _is_ours(status: os.stat_result) -> bool:
    """Whether it belongs to the user and only the user may change it."""
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.geteuid() and not others_write


def _is_private(place: Path) -> bool:
    try:
        status = place.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and _is_ours(status)


def _read_own(path: Path) -> bytes | None:
    """The contents of a file, whose ownership is checked after opening it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
            return None
        try:
            return file.read()
        except OSError:
            return None


def _payload(key: str, data: bytes) -> bytes | None:
    """What follows the header, if the header is valid."""
    payload = data[_HEADER:]
    expected = _MAGIC + _digest(key.encode()) + _digest(payload)
    return payload if data[:_HEADER] == expected else None


def _write_at_once(path: Path, data: bytes) -> None:
    """Writes atomically: others see all or nothing. `mkstemp` sets mode 0600."""
    with _temporary(path.parent) as (descriptor, name):
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)


@contextlib.contextmanager
def _temporary(place: Path) -> Iterator[tuple[int, str]]:
    descriptor, name = tempfile.mkstemp(prefix=_WRITING, dir=place)
    try:
        yield descriptor, name
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


# Bytes this process may still store before it rescans a folder with this limit.
_room: dict[tuple[Path, int], int] = {}


def _evict(place: Path, limit: int, added: int) -> None:
    """Remove the least recently used files if the store may be too large.

    Scanning the folder takes longer than storing a file, so it is rare. Half of the
    remaining room is left to other processes, and eviction frees room for several files
    at once.
    """
    left = _room.get((place, limit), 0) - added
    if left < 0:
        found = entries()
        total = sum(entry.size for entry in found)
        most = limit if total <= limit else limit - limit // 16
        for entry in found:
            if total <= most:
                break
            with contextlib.suppress(OSError):
                entry.path.unlink()
            total -= entry.size
        left = (limit - total) // 2
    _room[place, limit] = left
