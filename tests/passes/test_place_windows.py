"""place_windows: clamps on index maps that leave their arrays. Text in, text out."""

import textwrap

import numpy as np
import pytest

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.lower.place_windows import place_windows
from tests.ir import kernels


def kernel(
    out_map: str = "yield %i",
    window: str = "4",
    grid: str = "(3,)",
    n: int = 10,
    sizes: str = "",
) -> Kernel:
    """Ones to each block of an output; `%t` holds scalars."""
    shape = "" if "squeezed" in window else "4"
    tile = f"f32[{shape}]" if shape else "f32"
    index = ":" if shape else ""
    found = parse_kernel(
        f"""
        kernel @k(%t: ref<i32[8] smem>, %o: ref<f32[{n}] any>) outputs 1 {{
          %size: i32 = load %t[0]
          %three: i32 = constant {{value=3}}
          pipeline {sizes}%o {{grid={grid}, windows=(out[{window}]),
              semantics=("arbitrary",)}}
            map (%i: i32) {{ {out_map} }}
            body (%p: i32, %ob: ref<{tile} block>) {{
              %one: {tile} = constant {{value=1.0}}
              store %ob[{index}] = %one
            }}
        }}
        """
    )
    verify(found)
    return found


def map_of(kernel: Kernel) -> str:
    """The text of the map, one line per op."""
    text = kernel.text
    start = text.index("map (%i: i32) {") + len("map (%i: i32) {")
    return textwrap.dedent(text[start : text.index("body")].rstrip()[:-1]).strip()


def placed_map(*args, **kwargs) -> str:
    old = kernel(*args, **kwargs)
    new = place_windows(old)
    verify(new)
    if new is not old:
        assert place_windows(new) is new  # what is placed stays as it is
    return map_of(new)


def clamped(last: int) -> str:
    return f"""
        %0: i32 = constant {{value=0}}
        %1: i32 = constant {{value={last}}}
        %2: i32 = clamp %0, %i, %1
        yield %2
        """


TWO = "%two: i32 = constant {value=2}\n"

IN_RANGE = {
    "id": {},
    "window larger than the array": dict(grid="(1,)", n=2),
    "reversed": dict(out_map=TWO + "%r: i32 = sub %two, %i yield %r"),
    "remainder": dict(out_map=TWO + "%r: i32 = rem %i, %two yield %r", grid="(90,)"),
    "number from outside": dict(
        out_map="%r: i32 = sub %three, %three yield %r", grid="(9,)"
    ),
    "clamped by its author": dict(
        out_map=TWO + "%r: i32 = min %i, %two yield %r", grid="(9,)"
    ),
    "no plain interval": dict(  # i - i * i + i * i
        out_map="%a: i32 = mul %i, %i\n%b: i32 = sub %i, %a\n"
        "%r: i32 = add %b, %a yield %r"
    ),
    "element": dict(window="element 4 pad (2, 1)", grid="(13,)"),
    "squeezed": dict(window="squeezed 1", grid="(10,)"),
    "no program": dict(grid="(0,)", n=0),
}

OUT_OF_RANGE = {
    "past the end": (dict(grid="(4,)"), clamped(2)),
    "window larger than the array": (dict(grid="(2,)", n=2), clamped(0)),
    "no elements": (dict(grid="(2,)", n=0), clamped(0)),
    "element": (dict(window="element 4 pad (2, 1)", grid="(14,)"), clamped(12)),
    "squeezed": (dict(window="squeezed 1", grid="(11,)"), clamped(9)),
    "dynamic grid": (dict(grid="(None,)", sizes="%size, "), clamped(2)),
    "before the first": (
        dict(out_map=TWO + "%r: i32 = sub %i, %two yield %r"),
        """
        %two: i32 = constant {value=2}
        %r: i32 = sub %i, %two
        %0: i32 = constant {value=0}
        %1: i32 = constant {value=2}
        %2: i32 = clamp %0, %r, %1
        yield %2
        """,
    ),
    "wraps around": (  # 2 * 2^31 is 0, but 1 * 2^31 is far below it
        dict(
            out_map="%f: i32 = constant {value=-2147483648}\n"
            "%r: i32 = mul %i, %f yield %r"
        ),
        """
        %f: i32 = constant {value=-2147483648}
        %r: i32 = mul %i, %f
        %0: i32 = constant {value=0}
        %1: i32 = constant {value=2}
        %2: i32 = clamp %0, %r, %1
        yield %2
        """,
    ),
    "looked up": (
        dict(out_map="%r: i32 = load %t[%i] yield %r"),
        """
        %r: i32 = load %t[%i]
        %0: i32 = constant {value=0}
        %1: i32 = constant {value=2}
        %2: i32 = clamp %0, %r, %1
        yield %2
        """,
    ),
    "length": (
        dict(out_map="yield %i, %i", window="bounded 4", grid="(6,)"),
        """
        %0: i32 = constant {value=0}
        %1: i32 = constant {value=4}
        %2: i32 = clamp %0, %i, %1
        yield %i, %2
        """,
    ),
}


@pytest.mark.parametrize("name", IN_RANGE)
def test_map_in_range_stays_as_it_is(name: str):
    old = kernel(**IN_RANGE[name])
    assert place_windows(old) is old


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_map_that_may_leave_the_array_is_clamped(name: str):
    arguments, wanted = OUT_OF_RANGE[name]
    assert placed_map(**arguments) == textwrap.dedent(wanted).strip()


@pytest.mark.parametrize(
    "make", [kernels.vector_add, kernels.matmul, kernels.flash_attention]
)
def test_ordinary_kernels_stay_as_they_are(make):
    made = make()
    assert place_windows(made) is made


def inner(out_map: str, count: str = "%five") -> Kernel:
    """A loop around a pipeline over scratch, in the kernel's pipeline."""
    return parse_kernel(
        f"""
        kernel @k(%o: ref<f32[40] any>) outputs 1 {{
          pipeline {{grid=(2,), windows=(), semantics=("arbitrary",)}}
            body (%p: i32) {{
              %zero: i32 = constant {{value=0}}
              %one: i32 = constant {{value=1}}
              %five: i32 = constant {{value=5}}
              for %zero, {count}, %one
                body (%l: i32) {{
                  pipeline %o {{grid=(2,), windows=(out[2]), semantics=("arbitrary",)}}
                    map (%i: i32) {{ {out_map} }}
                    body (%q: i32, %ob: ref<f32[2] block>) {{
                      %ones: f32[2] = constant {{value=1.0}}
                      store %ob[:] = %ones
                    }}
                }}
            }}
        }}
        """
    )


# Of 20 blocks: the loop's counter, the program and the step, at most 10 + 4 + 1.
DIGITS = (
    "%ten: i32 = constant {value=10}\n%a: i32 = mul %p, %ten\n"
    "%b: i32 = add %a, %l\n%r: i32 = add %b, %i yield %r"
)


def test_pipelines_inside_see_the_ranges_around_them():
    old = inner(DIGITS)
    assert place_windows(old) is old
    new = place_windows(inner(DIGITS.replace("{value=10}", "{value=15}")))
    assert [op.name for op in walk(new.body)].count("clamp") == 1


def numbers(kernel: Kernel, *arrays: np.ndarray) -> np.ndarray:
    (result,) = Walker(kernel, NumpyNumbers()).run(list(arrays))
    return np.asarray(result)


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_placed_kernel_means_the_same(name: str):
    arguments, _ = OUT_OF_RANGE[name]
    old = kernel(**arguments)
    scalars = np.array([3, -1, 7, 1, 0, 0, 0, 0], np.int32)
    wrote = [numbers(k, scalars) == 1.0 for k in (old, place_windows(old))]
    np.testing.assert_array_equal(*wrote)


# --- grid analysis sees through the clamp ---


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_grid_analysis_says_the_same_of_a_placed_kernel(name: str):
    arguments, _ = OUT_OF_RANGE[name]
    old = kernel(**arguments)
    new = analyze(place_windows(old))
    assert str(new) == str(analyze(old)) and new.axes == analyze(old).axes


def test_dynamic_axis_of_a_placed_kernel_is_parallel_up_to_a_size():
    (axis,) = analyze(place_windows(kernel(grid="(None,)", sizes="%size, "))).axes
    assert axis.parallel and axis.most == 3


def test_offset_from_memory_of_a_placed_kernel_is_taken_to_be_good():
    code = "%o0: i32 = load %t[1]\n%r: i32 = add %o0, %i yield %r"
    (axis,) = analyze(place_windows(kernel(code))).axes
    assert axis.parallel


def test_axis_whose_blocks_are_clamped_is_sequential():
    (axis,) = analyze(place_windows(kernel(grid="(4,)"))).axes
    assert not axis.parallel
