"""No access of emitted CUDA is outside, whatever data say (`bounds.py`).

`python -m tests.backends.cuda.prove_all` proves the zoo, the forms and the library.
"""

import re
from functools import cache, partial

import jax
import pytest

import pallasite as pl
from pallasite.errors import ResourceError, UnsupportedError
from pallasite.ir.nodes import Kernel
from tests.backends.cpu import hostile
from tests.backends.cuda import bounds, host, kernels
from tests.backends.cuda.kernels import bf16
from tests.backends.cuda.linear import Condition, Path, constant, greatest, symbol
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments

ZOO = {case.name: case for case in all_cases()}
# What they use of the emitter: masks of blocks past the edge in one and two
# dimensions, clamped and masked gathers, transposes, loops that carry numbers.
MASKED = (
    "bias_residual",
    "where_clip",
    "transpose_tiles",
    "scatter_array_index",
    "gather_array_index",
    "dynamic_window",
    "cross_entropy",
    "embedding_lookup",
    "dma_double_buffer",
    "stencil_1d_element",
    "top_k",
    "mandelbrot",
)


def emitted(function, *operands) -> tuple[str, Kernel]:
    (kernel,) = pl.lower(function)(*operands).kernels
    return host.cuda_text(kernel), kernel


@cache
def of_zoo(name: str) -> tuple[str, Kernel]:
    case = ZOO[name]
    run = lambda *args: case.run(*args, interpret=False, backend="cuda")
    return emitted(run, *arguments(case, 0))


@cache
def of_matmul() -> tuple[str, Kernel]:
    """Persistent programs, in an order that is not that of the grid."""
    x, y = kernels.normal(700, 256, dtype=bf16), kernels.normal(256, 4808, dtype=bf16)
    return emitted(partial(kernels.matmul, block=(128, 128, 64)), x, y)


@cache
def of_attention(style: str = "grid") -> tuple[str, Kernel]:
    q = kernels.normal(2, 512, 64, dtype=bf16)
    return emitted(partial(kernels.attention, style=style, causal=True), q, q, q)


@pytest.mark.parametrize("name", MASKED)
def test_accesses_of_the_zoo(name):
    report = bounds.check(*of_zoo(name))
    assert report.accesses and not report.outside


def test_accesses_of_matmuls():
    report = bounds.check(*of_matmul())
    assert report.accesses > 50 and not report.outside


@pytest.mark.parametrize("style", ["grid", "loop"])
def test_accesses_of_attention(style):
    report = bounds.check(*of_attention(style))
    assert report.accesses > 300 and not report.outside


def test_hostile_kernels():
    """Indices of every type, for which only the emitter's clamps and masks hold."""
    proved = 0
    with jax.enable_x64(True):
        for name, kernel in hostile.kernels(programs=True):
            try:
                text = host.cuda_text(kernel)
            except (UnsupportedError, ResourceError):
                continue
            assert not bounds.check(text, kernel).outside, name
            proved += 1
    assert proved >= 40


# A mistake of the emitter as a change of the text: what was, and what it becomes.
MISTAKES = r"""
of bias_residual
  a mask is one too wide
    < 100\b
    < 101
  a mask of the other dimension
    < 37\b
    < 100
  rows are too far apart
    \* 100 \+
    * 104 +
  an array in registers is too short
    float x2\[16\]
    float x2[12]
  a function that is not known
    get<16>\(
    get_all<16>(
of transpose_tiles
  blocks are too far apart
    \(program0\) \* 16\)
    program0 * 17)
of dynamic_window
  an index is not clamped below
    max\((x\d+), 0\)
    \1
  an index is not clamped above
    min\((max\(x\d+, 0\)), \d+\)
    \1
  a clamp is one too far
    \(min\(max\(x1, 0\), 24\)\)
    (min(max(x1, 0), 25))
of scatter_array_index
  a mask of a scatter is dropped
     && \(u32\)\(v\d+\[i\]\) < 48u
    nothing
of where_clip
  vectors are too wide
    get<8>
    get<16>
of matmul
  copies into a slot too many
    const int (c\d+) = 5;
    const int \1 = 6;
  a ring starts too late
    ring2 = shared_address\(shared\) \+ \d+
    ring2 = shared_address(shared) + 131072
  boxes are too large
    map_dim<1>\(at, 700, 128\)
    map_dim<1>(at, 700, 256)
  an array of a tensor map is too large
    map_dim<1>\(at, 700,
    map_dim<1>(at, 701,
  rows of a tensor map are too far apart
    map_stride<0>\(at, 512\)
    map_stride<0>(at, 1024)
  a barrier past the last
    min\(max\((v\d+), 0\), 5\)
    (\1 + 1)
  an operand of the next slot
    \* 16384 \+ group \* 8192
    * 16384 + (group + 3) * 8192
  a tensor map of another program
    maps = scratch \+ \(i64\)blockIdx.x
    maps = scratch + (i64)(blockIdx.x + 1)
of attention
  results staged past the end
    stage(\d+) = shared_address\(shared\) \+ (\d+) \+ group
    stage\1 = shared_address(shared) + \2 + (group + 1)
  a matmul of the next operand
    operand\(ring2, 16\)
    operand(ring2 + 81920, 16)
"""


def mistakes() -> dict[str, tuple[str, str, str]]:
    """By what is wrong: the kernel, what is looked for, what it becomes."""
    found, kernel = {}, ""
    lines = MISTAKES.strip().splitlines()
    while lines:
        if lines[0].startswith("of "):
            kernel = lines.pop(0).removeprefix("of ")
        what, was, becomes = (lines.pop(0).strip() for _ in range(3))
        found[what] = (kernel, was, "" if becomes == "nothing" else becomes)
    return found


@pytest.mark.parametrize(
    ("name", "was", "becomes"), mistakes().values(), ids=mistakes().keys()
)
def test_mistakes_are_found(name, was, becomes):
    of = {"matmul": of_matmul, "attention": of_attention}.get(name)
    text, kernel = of() if of else of_zoo(name)
    start = text.index('extern "C"')
    changed, count = re.subn(was, becomes, text[start:])
    assert count, text[start:]
    assert bounds.check(text[:start] + changed, kernel).outside


# --- what proofs rest on ---


def test_facts_bound_sums():
    x, y = symbol(0, 100), symbol(0, 100)
    path = Path().assume(Condition("least", (constant(60) - x - y,)))
    assert path.at_most(x + y, 60) and not path.at_most(x + y, 59)
    assert greatest(x * 2 + y, path) == 120


def test_multiples_below_a_number_are_below_the_next_multiple():
    x = symbol(0, 100)
    path = Path().assume(Condition("least", (constant(30) - x * 4,)))
    assert path.range(x) == (0, 7)


def test_what_contradicts_is_never_reached():
    x = symbol(0, 5)
    assert Path().assume(Condition("least", (x - 6,))).dead
    both = Condition("zero", (x,)), Condition("zero", (x - 1,))
    assert Path().assume(Condition("and", both)).dead


TEXT = """
extern "C" __global__ void __launch_bounds__(32)
k(const int* __restrict__ a0, float* a1) {
  const u32 thread = threadIdx.x;
  BODY
}
"""


INSIDE = """
a1[thread] = 0.0f;

if (thread < 31) a1[thread + 1] = 0.0f;

const int n = a0[0];
if ((u32)n < 32u) a1[n] = 0.0f;

a1[(u32)a0[0] % 32u] = 0.0f;

a1[a0[0] & 31] = 0.0f;

a1[thread ^ 31] = 0.0f;

int v;
v = 0;
while (true) {
if (!(v < 32)) break;
a1[v] = 0.0f;
v = v + 1;
}

int v;
v = 0;
for (int n = 0;
n < a0[0];
n += 1) {
a1[v] = 0.0f;
v = v == 31 ? 0 : v + 1;
}

int x[4];
EACH(4) x[i] = a0[i];
EACH(4) {
if (x[i] >= 0 && x[i] < 32) a1[x[i]] = 0.0f;
}

float* p = thread < 16 ? a1 : a1 + 16;
p[thread % 16] = 0.0f;
"""
OUTSIDE = """
a1[thread + 1] = 0.0f;

a1[a0[0]] = 0.0f;

const int n = a0[0];
if (n < 32) a1[n] = 0.0f;

a1[a0[0] % 32] = 0.0f;

a1[a0[0] & 32] = 0.0f;

a1[thread ^ 32] = 0.0f;

int v;
v = 0;
while (true) {
if (!(v < 33)) break;
a1[v] = 0.0f;
v = v + 1;
}

int v;
v = 0;
for (int n = 0;
n < a0[0];
n += 1) {
a1[v] = 0.0f;
v = v == 32 ? 0 : v + 1;
}

int x[4];
EACH(4) x[i] = a0[i];
EACH(4) {
if (x[i] >= 0 && x[3 - i] < 32) a1[x[i]] = 0.0f;
}

int x[4];
EACH(5) x[i] = 0;

float* p = thread < 16 ? a1 : a1 + 17;
p[thread % 16] = 0.0f;
"""


@pytest.mark.parametrize("body", INSIDE.strip().split("\n\n"))
def test_what_is_inside(body):
    report = bounds.check_text(TEXT.replace("BODY", body), [128, 128], 1, 32)
    assert not report.outside


@pytest.mark.parametrize("body", OUTSIDE.strip().split("\n\n"))
def test_what_may_be_outside(body):
    report = bounds.check_text(TEXT.replace("BODY", body), [128, 128], 1, 32)
    assert report.outside


def test_types_wrap():
    """A product that leaves its type is any number of that type."""
    text = TEXT.replace("BODY", "a1[(thread * 268435456u) % 64u] = 0.0f;")
    assert bounds.check_text(text, [128, 128], programs=1, threads=32).outside
