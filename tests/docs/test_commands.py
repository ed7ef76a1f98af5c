"""Every `pallasite` command that README.md and the documentation show runs as written.

A folder has the files that they name. A server, the tuner and benchmarks are replaced
by what says that they were reached; their own tests run them.
"""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from pallasite import __main__ as command_line
from pallasite.tools import command
from pallasite.tools.explorer import serve
from pallasite.tune import autotune

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINE = re.compile(r"^pallasite (.*)$|`pallasite ([^`]+)`", re.M)
IN_CHILD = ("check", "explain", "explore", "profile", "prove")
# Columns beside a command are not part of it; nor is a placeholder a file, or a name in
# a sentence a command.
NOTE = re.compile(r"\s{2,}.*|\s+#.*")
PLACEHOLDER = re.compile(r"\bFILE\b|\bFUNCTION\b|\.\.\.|^run ")

KERNELS = """
import jax
import jax.numpy as jnp
import pallasite as pl


def softmax_kernel(x_ref, o_ref):
    x = x_ref[...]
    e = jnp.exp(x - x.max(axis=1, keepdims=True))
    o_ref[...] = e / e.sum(axis=1, keepdims=True)


def softmax(x):
    rows = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        softmax_kernel, out_shape=x, grid=pl.cdiv(x.shape[0], 8), in_specs=[rows],
        out_specs=rows,
    )(x)


def matmul_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...])


@pl.tunable(block=(128, 256))
def matmul(x, y, block=128):
    return softmax(x) @ y


def gather_kernel(i_ref, x_ref, o_ref):
    o_ref[0, :] = x_ref[i_ref[0], :]
    o_ref[1, :] = x_ref[i_ref[1], :]


def gather(i, x):
    return pl.pallas_call(
        gather_kernel, out_shape=jax.ShapeDtypeStruct((2, 128), jnp.float32)
    )(i, x)


if __name__ == "__main__":
    softmax(jnp.ones((16, 128)))
"""


def shown() -> list[str]:
    found = dict[str, None]()  # in order, each once
    for page in PAGES:
        for whole, inside in LINE.findall(page.read_text()):
            text = NOTE.sub("", whole or inside)
            if not PLACEHOLDER.search(text) and (whole or ".py" in text):
                found[text] = None
    return list(found)


def test_commands_are_found():
    names = {text.split()[0] for text in shown()}
    assert names >= {*IN_CHILD, "bench", "cache", "tune"}


def marked(text: str) -> object:
    for_tpus = "tpu:" in text or text.startswith("check")
    return pytest.param(text, marks=[pytest.mark.tpu] if for_tpus else [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The files that commands name: a script, and modules with kernels."""
    found = tmp_path_factory.mktemp("commands")
    for name in ("train.py", "kernel.py", "kernels.py", "my_kernels.py"):
        (found / name).write_text(KERNELS)
    return found


@pytest.mark.machine_only
@pytest.mark.parametrize("text", [marked(text) for text in shown()])
def test_a_command_that_is_shown_runs(text, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PALLASITE_CACHE_DIR", str(folder / "cache"))  # one is cleared
    monkeypatch.setattr(command_line, "_install", lambda: None)
    reached = []

    def tuned(function, **how):
        saved = reached.append
        return lambda *args: SimpleNamespace(interrupted=False, save=saved)

    monkeypatch.setattr(autotune, "autotune", tuned)
    monkeypatch.setattr(
        command_line, "_bench", lambda given: reached.append(given) or 0
    )
    given = shlex.split(text)
    if "--serve" in given:
        monkeypatch.setattr(serve, "serve", lambda *_: reached.append("serve") or 0)
    elif given[0] in IN_CHILD:
        given.append("--in-child")
    assert command_line.main(given) == command.OK, capfd.readouterr().err
    assert capfd.readouterr().out or reached
