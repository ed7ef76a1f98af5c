"""The package's own source as part of the key of compiled code on disk."""

import hashlib
import secrets
from functools import cache
from pathlib import Path

from pallasite import config


def files_in(*places: str) -> list[Path]:
    """The Python files at or below some paths in the package."""
    paths = [config.PACKAGE / place for place in places]
    below = [file for path in paths for file in path.rglob("*.py")]
    return sorted(below + [path for path in paths if path.suffix == ".py"])


@cache
def hash_of(*places: str) -> str:
    """A hash of those files; if unreadable, a new one in each process."""
    try:
        contents = [file.read_bytes() for file in files_in(*places)]
    except OSError:
        contents = []
    return hashlib.sha256(b"".join(contents) or secrets.token_bytes()).hexdigest()
