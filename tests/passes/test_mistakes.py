"""Mistakes told where a kernel is traced: found in IR, warned of at the line."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import CheckError, KernelWarning, PallasWarning
from pallasite.ir.text import parse_kernel
from pallasite.passes.analysis.mistakes import mistakes

KERNEL = """
kernel @k(%x: ref<f32[8] any>, %n: ref<i32[8] any>, %o: ref<{out} any>) outputs 1 {{
  %s: ref<f32[8] vmem> = alloc
  %sem: ref<i32 dma_sem> = alloc
  pipeline %x, %n, %o {{grid=({grid},), windows=(in[8], in[8], out[8]),
      semantics=("arbitrary",)}}
    map (%i0: i32) {{ yield %i0 }}
    map (%i1: i32) {{ yield %i1 }}
    map (%i2: i32) {{ yield %i2 }}
    body (%i: i32, %xb: ref<f32[8] block>, %nb: ref<i32[8] block>,
        %ob: ref<{out} block>) {{
      %v: f32[8] = load %xb[:]
      %w: i32[8] = load %nb[:]
      {body}
    }}
}}
"""


def found(body: str, grid: int = 4, out: str = "f32[8]") -> list[str]:
    """What is wrong with a kernel, the first words of it."""
    kernel = parse_kernel(KERNEL.format(body=body, grid=grid, out=out))
    return [m.what.split(":")[0] for m in mistakes(kernel)]


NEVER_STORED = "the kernel never stores to an output"
ADDS_TO_OUTPUT = "the kernel accumulates into an output that is never initialised"
NEVER_WAITED = "the kernel starts a copy and never waits for it"
ADDS_TO_SCRATCH = "the kernel accumulates into scratch that is never initialised"

OLD = "%a: f32[8] = load %ob[:] "
ADD = OLD + "%b: f32[8] = add %a, %v store %ob[:] = %b "
STORE = "store %ob[:] = %v "
FOR = "%f0: i32 = constant {value=0} %f1: i32 = constant {value=1} for %f0, %i, %f1 "
VIEW = "ref<f32[4] block> = subview %ob[0:+4] "
WIDE = "%b: f64[8] = cast %a {dtype=f64} %w1: f64[8] = cast %v {dtype=f64} "

WRONG = {
    "nothing": ("", NEVER_STORED),
    "only read": (OLD + "store %s[:] = %a", NEVER_STORED),
    "add": (ADD, ADDS_TO_OUTPUT),
    "add to scratch": (ADD.replace("%ob", "%s") + STORE, ADDS_TO_SCRATCH),
    "in a loop": (FOR + "body (%j: i32) { " + ADD + "}", ADDS_TO_OUTPUT),
    "in a branch": ("cond %i branch () {} branch () { " + ADD + "}", ADDS_TO_OUTPUT),
    "rescaled": (
        OLD + "%b: f32[8] = mul %a, %v %c: f32[8] = add %b, %v store %ob[:] = %c",
        ADDS_TO_OUTPUT,
    ),
    "converted": (
        OLD
        + WIDE
        + "%d: f64[8] = add %b, %w1 %e: f32[8] = cast %d {dtype=f32} store %ob[:] = %e",
        ADDS_TO_OUTPUT,
    ),
    "through views": (
        f"%p: {VIEW} %a: f32[4] = load %p[:] %b: f32[4] = neg %a %q: {VIEW} "
        "store %q[:] = %b",
        ADDS_TO_OUTPUT,
    ),
    "another semaphore": (
        STORE
        + "%r: ref<i32 sem> = alloc copy_start %xb, %s, %r {priority=0} "
        + "copy_wait %xb, %s, %r",
        "a copy signals a semaphore that is not a DMA semaphore",
    ),
    "no wait": (STORE + "copy_start %xb, %s, %sem {priority=0}", NEVER_WAITED),
    "atomically": (
        '%a: f32[8] = atomic_rmw %ob[:] = %v {kind="add"}',
        ADDS_TO_OUTPUT,
    ),
}
FINE = {
    "store": STORE,
    "store of a part": "%p: " + VIEW + "%a: f32[4] = load %xb[0:+4] store %p[:] = %a",
    "set in a branch": "cond %i branch () { " + STORE + "} branch () {} " + ADD,
    "set later": ADD + STORE,
    "set in a loop": FOR + "body (%j: i32) { " + STORE + "} " + ADD,
    "set by a copy": "copy_start %xb, %ob, %sem {priority=0} "
    "copy_wait %xb, %ob, %sem " + ADD,
    "another chip's barrier": STORE
    + "%r: ref<i32[2] mbarrier @arrivals(1)> = alloc "
    + "%t: ref<i32 mbarrier @arrivals(1)> = subview %r[0] "
    + "copy_start %xb, %s, %t {priority=0} copy_wait %xb, %s, %t",
    "waited for in a branch": STORE
    + "copy_start %xb, %s, %sem {priority=0} "
    + "cond %i branch () { copy_wait %xb, %s, %sem } branch () {} ",
    "set atomically": '%t: f32[8] = atomic_rmw %ob[:] = %v {kind="xchg"} ' + ADD,
    "chosen": OLD
    + "%b: f32[8] = add %a, %v %c: bool[8] = lt %w, %w "
    + "%d: f32[8] = select_n %c, %b, %v store %ob[:] = %d",
    "of another part": "%a: f32[4] = load %ob[4:+4] store %ob[0:+4] = %a",
    "a difference": OLD + "%b: f32[8] = sub %a, %a store %ob[:] = %b",
    "a sum in a branch's result": OLD
    + "%b: f32[8] = cond %i branch () { yield %a } branch () { yield %v } "
    + "store %ob[:] = %b",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_every_run_is_found(name):
    body, what = WRONG[name]
    assert found(body) == [what]


@pytest.mark.parametrize("name", FINE)
def test_what_may_be_right_is_not_told(name):
    assert found(FINE[name]) == []


def test_a_product_of_integers_may_be_zero():
    body = "%a: i32[8] = load %ob[:] %b: i32[8] = mul %a, %w store %ob[:] = %b"
    assert found(body, out="i32[8]") == []
    added = body.replace("mul", "add")
    assert found(added, out="i32[8]") == [ADDS_TO_OUTPUT]


def test_a_grid_without_programs():
    assert found(STORE, grid=0) == ["the grid has no programs"]
    assert found("", grid=0, out="f32[0]") == []  # nothing to write


def test_aliased_outputs_are_set():
    text = KERNEL.format(body=ADD, grid=4, out="f32[8]")
    assert not list(
        mistakes(parse_kernel(text.replace("outputs 1", "outputs 1 aliases {0: 0}")))
    )


# --- as an author meets them ---

S = jax.ShapeDtypeStruct
X = jnp.ones((16, 128))
ROWS = pl.BlockSpec((8, 128), lambda i: (i, 0))
FIRST = pl.BlockSpec((8, 128), lambda i: (0, 0))


def sums(x_ref, o_ref):
    o_ref[...] += x_ref[...]


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def idle(x_ref, o_ref):
    del x_ref, o_ref


def keeps(x_ref, o_ref, sum_ref):
    sum_ref[...] = jnp.maximum(sum_ref[...], x_ref[...])
    o_ref[...] = sum_ref[...]


def call(kernel, **changes):
    out = S((8, 128), jnp.float32)
    options = dict(grid=2, in_specs=[ROWS], out_specs=FIRST, out_shape=out)
    return pl.pallas_call(kernel, **{**options, **changes})(X)


TOLD = {
    "sum": (
        lambda: call(sums),
        sums,
        "the kernel accumulates into an output that is never initialised: its "
        "contents are undefined\n  kernel  sums\n  output  o_ref, f32[8,128]",
    ),
    "scratch": (
        lambda: call(keeps, scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)]),
        keeps,
        "the kernel accumulates into scratch that is never initialised: its contents "
        "are undefined\n  kernel   keeps\n  scratch  sum_ref, f32[8,128]",
    ),
    "nothing stored": (
        lambda: call(idle),
        call,
        "the kernel never stores to an output: its contents are undefined\n  kernel  "
        "idle\n  output  o_ref, f32[8,128]",
    ),
    "no programs": (
        lambda: call(copy, grid=0),
        call,
        "the grid has no programs: the outputs are never written\n"
        "  kernel   copy\n  grid     (0,)\n  outputs  o_ref, f32[8,128]",
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_warnings_have_the_form_of_errors_and_the_authors_line(name):
    run, function, text = TOLD[name]
    with pytest.warns(KernelWarning) as told:
        run()
    (warning,) = told
    message = str(warning.message)
    assert message.startswith(text) and "\n  fix " in message
    assert warning.filename.endswith("test_mistakes.py")
    first = function.__code__.co_firstlineno
    assert first < warning.lineno < first + 6
    assert issubclass(KernelWarning, PallasWarning)


def test_a_mistake_is_told_once():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            call(lambda x_ref, o_ref: o_ref.__setitem__(..., o_ref[...] + x_ref[...]))
    assert len(told) == 1


def pipelined(x_ref, o_ref):
    pltpu.emit_pipeline(copy, grid=2, in_specs=[ROWS], out_specs=[ROWS])(x_ref, o_ref)


def summed_by_steps(x_ref, o_ref):
    o_ref[...] = jnp.zeros_like(o_ref)
    pltpu.emit_pipeline(sums, grid=2, in_specs=[ROWS], out_specs=[FIRST])(x_ref, o_ref)


def chosen(x_ref, o_ref):
    before = jnp.where(pl.program_id(0) == 0, 0.0, o_ref[...])
    o_ref[...] = before + x_ref[...]


def set_in_the_first(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...]


def copied(x_ref, o_ref):
    pltpu.sync_copy(x_ref, o_ref)
    o_ref[...] += x_ref[...]


def in_a_scope(x_ref, o_ref):
    def scoped(sum_ref):
        for row in range(8):
            sum_ref.at[row][...] = x_ref[row]
        sum_ref[...] += x_ref[...]
        pltpu.sync_copy(sum_ref, o_ref)

    pl.run_scoped(scoped, pltpu.VMEM((8, 128), jnp.float32))


WHOLE = dict(grid=(), in_specs=[pl.BlockSpec()], out_specs=pl.BlockSpec())
RIGHT = {
    pipelined: dict(out_shape=X, **WHOLE),
    summed_by_steps: WHOLE,
    chosen: {},
    set_in_the_first: {},
    copied: {},
    in_a_scope: {},
    sums: dict(out_shape=X, out_specs=ROWS, input_output_aliases={0: 0}),
}


@pytest.mark.parametrize("kernel", RIGHT, ids=lambda k: k.__name__)
def test_right_kernels_are_not_warned_of(kernel):
    call(kernel, interpret=True, **RIGHT[kernel])


def test_checked_mode_reports_by_itself():
    with pytest.raises(CheckError):
        call(sums, interpret=pl.Checked())
