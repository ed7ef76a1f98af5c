"""Kernels that a TPU cannot run are refused in our words, with the line and the fix.

The expected texts are in hostile.txt, one section per case; run with
`PALLASITE_UPDATE_GOLDEN=1` to rewrite the file, then read the difference.
"""

import os
import re
from pathlib import Path

import jax
import pytest

import pallasite as pl
from pallasite.errors import PallasError
from pallasite.runtime import aot
from pallasite.tools.aot import Aot
from tests.backends.tpu.hostile import CASES

GOLDEN = Path(__file__).with_name("hostile.txt")
CHIP = "tpu:v5e"
# What looks wrong, and is not: it compiles.
FINE = {
    "large_array_accessed_directly",
    "large_array_accessed_where_data_say",
    "an_inner_pipeline_over_the_edge",
    "a_backend_of_another_chip",
    "a_body_with_very_much_code",
    "a_convolution",
    "a_copy_that_begins_inside_a_tile",
    "a_loop_without_an_end",
    "a_name_that_is_no_name",
    "a_print_of_a_double",
    "a_sort",
    "a_transposed_view",
    "a_view_in_a_narrower_type",
    "an_operand_is_written",
    "more_buffers_than_there_is_room_for",
    "no_operands_and_an_empty_grid",
}

# libtpu does not end on the first, and takes minutes for the second.
ENDLESS = {"a_loop_without_an_end", "a_body_with_very_much_code"}

pytestmark = pytest.mark.filterwarnings("ignore::pallasite.errors.PallasWarning")


def said(name: str) -> str:
    """What is said of a case; empty if it compiles."""
    with jax.enable_x64(True):
        try:
            function, *operands = CASES[name]()
            text = pl.aot(function, *operands).compile(CHIP).kernels[0].error
        except PallasError as error:
            text = str(error)
    return re.sub(r"at( +)\S*hostile\.py:\d+ in \S+", r"at\1here", text)


@pytest.fixture(autouse=True)
def without_libtpu(monkeypatch):
    monkeypatch.setattr(aot, "missing", lambda: "libtpu is not installed")


def sections() -> dict[str, str]:
    parts = GOLDEN.read_text().split("--- ")[1:] if GOLDEN.exists() else []
    return {head: text.strip() for head, _, text in (p.partition("\n") for p in parts)}


def test_every_hostile_kernel_is_refused_in_our_words():
    found = {name: said(name) for name in CASES if name not in FINE}
    if os.environ.get("PALLASITE_UPDATE_GOLDEN"):
        texts = [f"--- {name}\n{text}\n" for name, text in found.items()]
        GOLDEN.write_text("".join(texts))
    assert found == sections()
    assert len(found) >= 40
    for name, text in found.items():
        lines = [line.strip() for line in text.splitlines()]
        assert any(re.fullmatch(r"at +here", line) for line in lines), name
        assert any(re.match(r"fix +\S", line) for line in lines), name


def test_what_only_looks_hostile_compiles():
    assert {name: text for name in FINE if (text := said(name))} == {}


@pytest.mark.tpu
@pytest.mark.slow
def test_libtpu_compiles_what_is_not_refused(monkeypatch):
    monkeypatch.undo()
    sites = []
    with jax.enable_x64(True):
        for name in sorted(FINE - ENDLESS):
            function, *operands = CASES[name]()
            sites += pl.aot(function, *operands).sites
        report = Aot(lambda: sites).compile(CHIP)
    assert [kernel.error for kernel in report.kernels if not kernel.ok] == []
