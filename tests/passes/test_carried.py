"""Along which grid axes scratch keeps what an earlier step left in it."""

import pytest

from pallasite.passes.analysis.carried import (
    carried_from,
    is_overwritten,
    reads_unwritten,
)
from tests.passes.texts import program, value_named

START = """
    %z: i32[8] = constant {value=0, type=i32[8]}
    %zero: i32 = constant {value=0, type=i32[]}
"""
READ = "%x: i32[8] = load %acc[:]\n"
STORE = "store %acc[:] = %z\n"
HALF = "%h: i32[4] = load %half[:]\nstore %acc[0:+4] = %h\n"


def at_first(axis: int, code: str, later: str = "") -> str:
    return f"""
        %t{axis}: bool = eq %i{axis}, %zero
        %n{axis}: i32 = cast %t{axis} {{dtype=i32}}
        cond %n{axis}
          branch () {{ {later} }}
          branch () {{ {code} }}
    """


def guarded(name: str, code: str, ref: str = "given") -> str:
    """Code for steps where what a number of memory, or an index, is not two."""
    axis = int(name == "v")
    number = (
        f"load %{ref}[%i{axis}]" if not name.startswith("i") else f"add %{name}, %zero"
    )
    return f"""
        %m{name}: i32 = {number}
        %two{name}: i32 = constant {{value=2, type=i32[]}}
        %q{name}: bool = ne %m{name}, %two{name}
        %r{name}: i32 = cast %q{name} {{dtype=i32}}
        cond %r{name}
          branch () {{ }}
          branch () {{ {code} }}
    """


# The first of two axes along which %acc is carried; 2: none.
CASES = {
    "read before": (READ + STORE, 0),
    "written before": (STORE + READ, 2),
    "never read": (STORE, 2),
    "reset along the last axis": (at_first(1, STORE) + READ + STORE, 1),
    "reset along the first axis": (at_first(0, STORE) + READ + STORE, 0),
    "read at later steps": (at_first(1, STORE, READ), 1),
    "filled once, read later": (at_first(1, at_first(0, STORE), READ), 0),
    "half is reset, all is read": (at_first(1, HALF, READ), 0),
    "half is reset and read": (at_first(1, HALF, "%x: i32[4] = load %acc[0:+4]"), 1),
    "other parts are reset": (
        at_first(1, "store %acc[%i0] = %i0", "%x: i32 = load %acc[%i0]"),
        0,
    ),
    "reset and read where a number says": (
        guarded("n", at_first(1, STORE) + READ),
        1,
    ),
    "reset where a number says": (guarded("n", at_first(1, STORE)) + READ, 0),
    "reset where it says so of later steps": (
        at_first(1, STORE, "") + guarded("i1", READ),
        1,
    ),
    "guarded by what varies": (guarded("v", at_first(1, STORE) + READ), 0),
    "guarded by what is written": (
        guarded("w", at_first(1, STORE) + READ, "numbers") + "store %numbers[0] = %i1",
        0,
    ),
    "guarded by what varies within a step": (
        f"""
        %c4: i32 = constant {{value=4, type=i32[]}}
        %c1: i32 = constant {{value=1, type=i32[]}}
        for %zero, %c4, %c1 body (%k: i32) {{
          %g: bool = eq %k, %i0
          %n: i32 = cast %g {{dtype=i32}}
          %f: bool = eq %k, %zero
          %m: i32 = cast %f {{dtype=i32}}
          cond %n
            branch () {{ }}
            branch () {{
              cond %m
                branch () {{ }}
                branch () {{ {STORE} }}
              {READ}
            }}
        }}
        """,
        0,
    ),
    "half is written": (HALF + READ, 0),
    "the same half is written": (HALF + "%x: i32[4] = load %acc[0:+4]", 2),
}
PARAMS = (
    "%acc: ref<i32[8] vmem>, %half: ref<i32[4] vmem>, %given: ref<i32[4] smem>, "
    "%numbers: ref<i32[4] smem>"
)


@pytest.mark.parametrize("name", CASES)
def test_first_axis_that_carries(name: str):
    code, axis = CASES[name]
    pipeline = program(START + code, (2, 3), PARAMS)
    ref = value_named(pipeline, "acc")
    constant = {value_named(pipeline, "given")} if "%given" in code else set()
    found = carried_from(pipeline.body, ref, pipeline.ids, pipeline.grid, constant)
    assert found == axis


def test_an_axis_of_one_step_resets_at_every_step():
    pipeline = program(START + at_first(0, STORE) + READ, (1, 3), PARAMS)
    ref = value_named(pipeline, "acc")
    assert carried_from(pipeline.body, ref, pipeline.ids, pipeline.grid) == 2


def test_overwritten_only_at_the_first_step():
    pipeline = program(START + at_first(0, STORE), params=PARAMS)
    ref, (index,) = value_named(pipeline, "acc"), pipeline.ids
    assert is_overwritten(pipeline.body.ops, ref, {index: 0})
    assert not is_overwritten(pipeline.body.ops, ref, {index: 1})


def test_a_later_step_reads_what_the_first_filled():
    pipeline = program(START + at_first(0, STORE) + READ, params=PARAMS)
    ref = value_named(pipeline, "acc")
    assert reads_unwritten(pipeline.body, ref, pipeline.ids, 0)
    pipeline = program(START + STORE + READ, params=PARAMS)
    ref = value_named(pipeline, "acc")
    assert not reads_unwritten(pipeline.body, ref, pipeline.ids, 0)


STEPS = "%four: i32 = constant {value=4, type=i32[]}\n" + "".join(
    f"%c{n}: i32 = constant {{value={n}, type=i32[]}}\n" for n in (1, 2, 8)
)
FOUR = "%f: i32[4] = constant {value=0, type=i32[4]}\n"


@pytest.mark.parametrize(
    ("bounds", "code", "swept"),
    [
        ("%zero, %c8, %four", FOUR + "store %acc[%i:+4] = %f", True),
        ("%zero, %c8, %c1", "store %acc[%i] = %zero", True),
        ("%zero, %c8, %four", "store %acc[%i] = %zero", False),
        ("%four, %c8, %four", FOUR + "store %acc[%i:+4] = %f", False),
        ("%zero, %four, %four", FOUR + "store %acc[%i:+4] = %f", False),
        ("%zero, %c8, %four", FOUR + "store %acc[0:+4] = %f", False),
        (
            "%zero, %c8, %c1",
            """
            %t: bool = eq %i, %zero
            %n: i32 = cast %t {dtype=i32}
            cond %n
              branch () {}
              branch () { store %acc[%i] = %zero }
            """,
            False,
        ),
    ],
)
def test_a_loop_overwrites_what_its_iterations_store_side_by_side(
    bounds: str, code: str, swept: bool
):
    loop = f"for {bounds} body (%i: i32) {{ {code} }}"
    pipeline = program(START + STEPS + loop, params=PARAMS)
    ref = value_named(pipeline, "acc")
    assert is_overwritten(pipeline.body.ops, ref, {}) == swept


SEVEN = "%c7: i32 = constant {value=7, type=i32[]}\n"
EARLIER = "%j: i32 = sub %i, %c1\n%y: i32 = load %acc[%j]\nstore %acc[%i] = %y"
FILL_NEXT = """
    %n: i32 = add %i, %c1
    %s: i32 = rem %n, %c2
    %t: bool = lt %n, %c8
    %u: i32 = cast %t {dtype=i32}
    cond %u
      branch () { }
      branch () { store %acc[%s] = %i }
"""


@pytest.mark.parametrize(
    ("before", "bounds", "code", "axis"),
    [
        ("store %acc[0] = %zero", "%c1, %c8, %c1", EARLIER, 2),
        ("store %acc[1] = %zero", "%c1, %c8, %c1", EARLIER, 0),
        ("store %acc[0] = %zero", "%c2, %c8, %c1", EARLIER, 0),
        (
            "store %acc[7] = %zero",
            "%zero, %c7, %c1",
            "%k: i32 = sub %c7, %i\n%j: i32 = sub %k, %c1\n"
            "%y: i32 = load %acc[%k]\nstore %acc[%j] = %y",
            2,
        ),
        (
            "store %acc[0] = %zero",
            "%zero, %c8, %c1",
            FILL_NEXT + "%m: i32 = rem %i, %c2\n%y: i32 = load %acc[%m]",
            2,
        ),
        (
            "store %acc[1] = %zero",
            "%zero, %c8, %c1",
            FILL_NEXT + "%m: i32 = rem %i, %c2\n%y: i32 = load %acc[%m]",
            0,
        ),
    ],
    ids=["down", "hole", "first", "up", "turns", "other"],
)
def test_rows_that_iterations_fill_for_each_other(before, bounds, code, axis):
    """As a tridiagonal solve in scratch, or two buffers that take turns."""
    given = f"{before}\nfor {bounds} body (%i: i32) {{ {code} }}"
    pipeline = program(START + STEPS + SEVEN + given, (2, 3), PARAMS)
    ref = value_named(pipeline, "acc")
    assert carried_from(pipeline.body, ref, pipeline.ids, pipeline.grid) == axis


@pytest.mark.parametrize(("first", "axis"), [(0, 2), (1, 0)])
def test_buffers_that_copies_fill_in_turns(first: int, axis: int):
    """Started an iteration ahead, each waits for its own semaphore."""
    copy = lambda n, at: (
        f"""
        %v{n}: ref<i32[4] vmem> = subview %buf[{at}, :]
        %w{n}: ref<i32[] dma_sem> = subview %sem[{at}]
    """
    )
    start = lambda n: f"copy_start %half, %v{n}, %w{n} {{priority=0}}\n"
    code = f"""
        {copy("a", first)} {start("a")}
        for %zero, %c8, %c1 body (%i: i32) {{
            %n: i32 = add %i, %c1
            %s: i32 = rem %n, %c2
            %t: bool = lt %n, %c8
            %u: i32 = cast %t {{dtype=i32}}
            cond %u
              branch () {{ }}
              branch () {{ {copy("b", "%s")} {start("b")} }}
            %m: i32 = rem %i, %c2
            {copy("c", "%m")}
            copy_wait %half, %vc, %wc {{priority=0}}
            %y: i32[4] = load %buf[%m, :]
        }}
    """
    params = "%buf: ref<i32[2,4] vmem>, %sem: ref<i32[2] dma_sem>, " + PARAMS
    pipeline = program(START + STEPS + code, (2, 3), params)
    for name in ("buf", "sem"):
        ref = value_named(pipeline, name)
        assert carried_from(pipeline.body, ref, pipeline.ids, pipeline.grid) == axis
