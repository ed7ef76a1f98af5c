"""The store of compiled code: what it keeps, what it refuses, and its command."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pallasite import config
from pallasite.__main__ import main
from pallasite.runtime import cache

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no file owners")


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "cache"
    with config.override(cache_dir=str(folder), cache_bytes=100_000):
        yield folder


def test_every_source_of_machine_code_enters_the_key():
    from pallasite.backends.cpu.call import compile as compiler

    names = {str(p.relative_to(config.PACKAGE)) for p in compiler.source_files()}
    folders = {name.rpartition("/")[0] for name in names}
    below = {f"backends/cpu/{name}" for name in ("call", "dot", "llvm", "ops", "tiles")}
    assert folders >= below | {"ir", "ops", "passes", "passes/analysis", "backends/cpu"}
    assert "target/cpu.py" in names and "backends/cpu/dot/microkernel.py" in names


def the_file(place: Path) -> Path:
    (path,) = place.iterdir()
    return path


def test_what_is_stored_is_found(place):
    assert cache.load("key") is None
    cache.store("key", b"code")
    assert cache.load("key") == b"code"
    assert cache.load("other") is None
    assert place.stat().st_mode & 0o777 == 0o700
    assert the_file(place).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("byte", [0, 20, 60, 90, -1])
def test_a_damaged_file_is_refused_and_removed(place, byte):
    cache.store("key", b"code" * 10)
    path = the_file(place)
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
    assert cache.load("key") is None
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 10, 83, 90])
def test_a_cut_file_is_refused(place, length):
    cache.store("key", b"code" * 10)
    path = the_file(place)
    path.write_bytes(path.read_bytes()[:length])
    assert cache.load("key") is None


def test_a_file_of_another_key_is_refused(place):
    cache.store("other", b"evil")
    other = the_file(place)
    cache.store("key", b"code")
    (mine,) = set(place.iterdir()) - {other}
    os.replace(other, mine)
    assert cache.load("key") is None


def test_files_others_may_write_are_refused(place):
    cache.store("key", b"code")
    the_file(place).chmod(0o666)
    assert cache.load("key") is None


def test_a_folder_others_may_write_is_refused(place):
    cache.store("key", b"code")
    place.chmod(0o777)
    assert cache.load("key") is None
    cache.store("second", b"code")
    assert len(list(place.iterdir())) == 1


def test_files_of_another_user_are_refused(place, monkeypatch):
    cache.store("key", b"code")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache.load("key") is None


def test_links_are_not_followed(place, tmp_path):
    cache.store("key", b"code")
    path = the_file(place)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.load("key") is None


def test_the_least_recently_used_go_first(place):
    for n in range(5):
        cache.store(str(n), bytes(18_000))
        for entry in cache.entries():
            os.utime(entry.path, (entry.used - 100, entry.used - 100))
    assert cache.load("0") is not None  # used again, so the next oldest goes
    cache.store("new", bytes(18_000))
    assert cache.load("1") is None
    assert cache.load("0") is not None and cache.load("new") is not None
    assert sum(entry.size for entry in cache.entries()) <= 100_000


def test_the_folder_is_not_read_at_each_store(place, monkeypatch):
    looks, entries = [], cache.entries
    monkeypatch.setattr(cache, "entries", lambda: looks.append(1) or entries())
    for n in range(1500):
        cache.store(str(n), bytes(30))
    assert sum(entry.size for entry in entries()) <= 100_000
    assert len(looks) < 150 and cache.load("1499") is not None


def test_what_is_too_large_is_not_stored(place):
    cache.store("key", bytes(200_000))
    assert cache.entries() == []


@pytest.mark.parametrize("off", [{"cache_dir": "off"}, {"cache_bytes": 0}])
def test_switched_off(place, off):
    cache.store("key", b"code")
    with config.override(**off):
        assert cache.folder() is None and cache.load("key") is None
        cache.store("second", b"code")
    assert len(cache.entries()) == 1


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    with config.override(cache_dir=str(tmp_path / "file" / "cache")):
        cache.store("key", b"code")
        assert cache.load("key") is None


def test_many_writers_at_once(place):
    wrong = []

    def use(n):
        with config.override(cache_dir=str(place), cache_bytes=100_000):
            for round in range(30):
                key = str(round % 7)
                cache.store(key, key.encode() * 5000)
                found = cache.load(key)
                if found not in (None, key.encode() * 5000):
                    wrong.append(key)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(path.suffix == ".kernel" for path in place.iterdir())


def test_the_command_shows_and_clears(place, capsys):
    cache.store("key", b"code")
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert str(place) in shown and "1 kernels" in shown
    assert main(["cache", "--clear"]) == 0
    assert cache.entries() == []
    with config.override(cache_dir="off"):
        main(["cache"])
    assert "disabled" in capsys.readouterr().out


PROGRAM = """
import sys
import jax.numpy as jnp
import pallasite as pl
import pallasite.backends.cpu as backend
from pallasite.backends.cpu.call import compile as compiler

if "warm" in sys.argv:
    backend.emit_kernel = compiler._optimized = None  # must not be needed

def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 3

x = jnp.arange(8.0)
print(pl.pallas_call(kernel, out_shape=x, backend="cpu")(x))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    environment = {**os.environ, "PALLASITE_CACHE_DIR": str(tmp_path / "cache")}
    environment["JAX_PLATFORMS"] = "cpu"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, temperature],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        for temperature in ("cold", "warm")
    ]
    for output in outputs:
        assert output.returncode == 0, output.stderr
        numbers = np.fromstring(output.stdout.strip()[1:-1], sep=" ")
        np.testing.assert_array_equal(numbers, np.arange(8) * 3)
