"""Forms of matmuls and attention that must not leave the fast path of `cuda`.

Each is lowered for an H200 without one. What is compared is the schedule: the ring
buffers in shared memory, which have the tiles that are copied and their stages. Beside
them, forms that Triton takes.
"""

import re
from dataclasses import replace
from functools import cache

import pytest

from pallasite import config
from pallasite.autodiff.backward import keeping_plan
from pallasite.backends import base
from pallasite.sites import calls_in
from pallasite.target import GPUS, Machine
from tests.forms import all_forms
from tests.forms.form import SIZES, gradient


@cache
def scheduled(name: str, backend: str = "cuda") -> str:
    form = next(form for form in all_forms() if form.name == name)
    structs, function = form.problem.structs(SIZES["model"]), form.make(SIZES["model"])
    (call,) = calls_in(function, *structs)
    options = replace(call.options, chip=GPUS["h200"])
    return base.Compiled(base.get(backend), call.kernel, options).scheduled.text


def gradient_rings(name: str) -> tuple[list[str], list[str]]:
    """Of the forward kernel that keeps statistics, and of the keys' cotangents."""
    form = next(form for form in all_forms() if form.name == name)
    structs = form.problem.structs(SIZES["model"])
    (call,) = calls_in(form.make(SIZES["model"]), *structs)
    chip = GPUS["h200"]
    made = keeping_plan(call.kernel, (True,) * 3, Machine.usual(chip))
    assert made is not None
    found = []
    for kernel in (made.forward.kernel, made.backward.steps[-1].kernel):
        options = replace(call.options, chip=chip)
        compiled = base.Compiled(base.get("cuda"), kernel, options)
        found.append(rings(compiled.scheduled.text))
    return found[0], found[1]


def rings(text: str) -> list[str]:
    return re.findall(r"ref<(\S+) smem @swizzle\(128\)> = alloc", text)


def test_a_product_alone_has_stages_to_hide_latency():
    """Of 256 x 128 x 128 blocks, two stages fit; of half the depth, four."""
    assert rings(scheduled("x @ w.T, 256 x 128")) == [
        "bf16[4,128,64]",
        "bf16[4,256,64]",
    ]


def test_a_product_that_is_stored_first_is_accumulated_by_the_tensor_cores():
    text = scheduled("output accumulated in place, first product stored")
    assert " = add" not in text.replace("i32 = add", "")
    assert rings(text) == rings(scheduled("output accumulated in place, f32"))


def test_two_loops_keep_their_rows():
    """Results of one loop and of the next are not in registers at the same time."""
    text = scheduled("two loops, as FlashAttention 2")
    assert rings(text)[0].endswith(",128,128]")


@pytest.mark.parametrize(
    "name",
    [
        "causal grid, statistics repeated over lanes",
        "causal grid, clamped map, leading units, lanes",
        "JAX's flash_attention, statistics by reshape and repeat",
    ],
)
def test_steps_of_256_keys_are_two_each(name: str):
    assert rings(scheduled(name)) == rings(scheduled("causal grid, column statistics"))


@pytest.mark.parametrize(
    "name",
    ["one program sees all keys, plain softmax", "all keys at once, as in numpy"],
)
def test_all_keys_at_once_are_a_loop(name: str):
    """As wide as heads are: no score is computed twice."""
    assert rings(scheduled(name)) == ["bf16[2,128,128]"] * 3


def test_programs_of_flat_heads_run_at_once():
    """All queries of all heads, not only the heads; two programs share an SM."""
    assert "grid=(264,)" in scheduled("causal grid, 64 x 64 blocks, flat heads")


def test_two_steps_of_64_keys_are_one_of_128():
    found = rings(scheduled("causal grid, 128 x 64 blocks"))
    assert found == rings(scheduled("causal grid, column statistics"))


def test_a_thin_path_leaves_steps_as_deep_as_they_were():
    """Its second product runs once, so fewer steps do not save any of it."""
    found = rings(scheduled("LoRA: a second, thin path"))
    assert {ring.split(",", 1)[1] for ring in found[:2]} == {"128,64]", "64,128]"}


def test_merged_queries_skip_keys_after_them():
    """Of 64 queries each, in a loop over 128 keys up to a rounded quotient."""
    grid, loop = map(
        scheduled, ("causal grid, column statistics", "fori loop, flat program order")
    )
    assert rings(loop) == rings(grid)
    assert loop.count(" = for ") == grid.count(" = for ")


@pytest.mark.parametrize(
    "name, step",
    [
        ("causal grid, 64 x 64 blocks, flat heads", "64,128"),
        ("causal grid, statistics repeated over lanes", "64,128"),
        ("edge length, filled", "64,128"),
        # Accumulators of 320 columns leave registers for 32 queries.
        ("192/128, grid", "32,192"),
    ],
)
def test_gradients_by_blocks_of_other_sizes(name: str, step: str):
    """Keys' cotangents by 128 keys and fewer queries, whatever the author's blocks."""
    _, keys = gradient_rings(name)
    assert [ring.split(",", 1)[1] for ring in keys[:2]] == [
        f"128,{step.split(',')[1]}]",
        f"{step}]",
    ]


@pytest.mark.parametrize(
    "name, rows",
    [("conv2d of nine shifted matmuls", 112), ("conv2d row by row of images", 32)],
)
def test_gradients_of_convolutions(name: str, rows: int):
    """A tap of the weights per program; its rows, with zeros after them, are deep."""
    form = next(form for form in all_forms() if form.name == name)
    structs = form.problem.structs(SIZES["model"])
    with config.override(target="gpu:h200"):
        asked = gradient(form.make(SIZES["model"]), structs)
        _, *calls = calls_in(asked, *structs)
    found = {}
    for call in calls:
        options = replace(call.options, chip=GPUS["h200"])
        text = base.Compiled(base.get("cuda"), call.kernel, options).scheduled.text
        found[call.kernel.name] = [ring.split(",", 1)[1] for ring in rings(text)]
    assert found.pop("kernel_d_w") == [f"{rows},128]"] * 2
    ((rows_of_x, _),) = found.values()
    assert rows_of_x.startswith("192,")


def test_two_matmuls_of_whole_weights_are_loops():
    """The inner width is a loop, and in it the depth of the first matmul another."""
    found = rings(scheduled("MLP: both weights whole in a block"))
    assert [ring.split(",", 1)[1] for ring in found] == ["128,64]", "64,64]", "64,256]"]


def test_masked_edges_are_filled_edges():
    masked, filled = scheduled("edge blocks, masked along k"), "edge blocks, filled"
    assert rings(masked) == rings(scheduled(filled))


@pytest.mark.parametrize(
    "name",
    [
        "edge length, vector statistics",
        "causal edge length, lanes",
        "causal grid, all state in outputs, lanes",
        "causal, vmap of one head",
        "several heads per block, einsum of rank 3",
        "JAX's flash_attention, statistics by reshape and repeat",
    ],
)
def test_forms_that_cuda_takes(name: str):
    assert "wgmma" in scheduled(name)


@pytest.mark.parametrize(
    "name, tile",
    [
        # Nine matmuls that are added up share an accumulator.
        ("conv2d row by row of images", "f32[28,128] = dot"),
        ("conv2d of nine shifted matmuls", "f32[112,128] = dot"),
        # Tiles of the whole length do not exist, or are narrow enough to be moved.
        ("linear recurrence by scan", "f32[32] = for"),
        # A tile of all products would leave room for one query only.
        ("decode fori multiply and sum", "f32[8,128] = dot"),
    ],
)
def test_tiles_of_triton(name: str, tile: str):
    assert tile in scheduled(name, "triton")
