"""Grid analysis: parallel and sequential axes, moving windows, carried scratch."""

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.analysis.grid import analyze, find_pipeline, window_axes

PARAMS = "%x: ref<f32[64,64] any>, %t: ref<i32[4] smem>, %o: ref<f32[64,64] any>"

BLOCKS = "%xb: ref<f32[8,8] block>, %ob: ref<f32[8,8] block>"


def kernel(
    out_map: str,
    body: str = "store %ob[:, :] = %z",
    grid: str = "(2, 3, 4)",
    semantics: str = '("arbitrary", "arbitrary", "arbitrary")',
    before: str = "",
    ids: str = "%i: i32, %j: i32, %k: i32",
    out_window: str = "out[8, 8]",
    aliases: str = "",
    in_map: str = "yield %i, %k",
):
    """A kernel with one input and one output window and the given pieces."""
    return parse_kernel(f"""
        kernel @k({PARAMS}) outputs 1 {aliases} {{
          {before}
          pipeline %x, %o {{grid={grid}, semantics={semantics},
              windows=(in[8, 8], {out_window})}}
            map ({ids}) {{ {in_map} }}
            map ({_renamed(ids)}) {{ {_renamed(out_map)} }}
            body ({_body_ids(ids)} {BLOCKS}) {{
              %z: f32[8,8] = constant {{value=0.0, type=f32[8,8]}}
              {body}
            }}
        }}
    """)


def _renamed(text: str) -> str:
    for name in "ijk":
        text = text.replace(f"%{name}", f"%{name}1")
    return text


def _body_ids(ids: str) -> str:
    for name in "ijk":
        ids = ids.replace(f"%{name}", f"%p{name}")
    return f"{ids}," if ids else ""


RESET = """
    %c0: i32 = constant {{value=0, type=i32[]}}
    %first: bool = eq {id}, %c0
    %n: i32 = cast %first {{dtype=i32}}
    cond %n
      branch () {{}}
      branch () {{
        store %acc[:, :] = %z
      }}
    %a: f32[8,8] = load %acc[:, :]
    store %acc[:, :] = %a
"""
ACC = "%acc: ref<f32[8,8] vmem> = alloc {type=ref<f32[8,8] vmem>}"


def test_accumulation_axis_is_sequential():
    info = analyze(kernel("yield %i, %j", "%a: f32[8,8] = load %ob[:, :]"))
    assert info.parallel == (0, 1)
    assert info.sequential == (2,)
    assert str(info) == "\n".join(
        [
            "grid 2 x 3 x 4",
            "  axis 0  parallel    each step writes its own blocks",
            "  axis 1  parallel    each step writes its own blocks",
            "  axis 2  sequential  several steps may write a block of o",
            "  in  x  (i0, i2)  moves along i0 i2",
            "  out o  (i0, i1)  moves along i0 i1; own along i0 i1",
        ]
    )


@pytest.mark.parametrize(
    ("out_map", "parallel"),
    [
        ("yield %i, %j", (0, 1)),
        ("yield %k, %i", (0, 2)),
        ("%s: i32 = add %i, %j yield %s, %k", (2,)),  # i + j meets itself
        ("%s: i32 = add %i, %j yield %s, %j", (0, 1)),  # but not where j is known
        (
            "%c: i32 = constant {value=3, type=i32[]} "
            "%m: i32 = mul %i, %c %s: i32 = add %m, %j yield %s, %k",
            (0, 1, 2),  # 3 i + j with j < 3 is a number in base 3
        ),
        (
            "%c: i32 = constant {value=2, type=i32[]} "
            "%m: i32 = mul %i, %c %s: i32 = add %m, %j yield %s, %k",
            (2,),
        ),
        (
            "%c: i32 = constant {value=2, type=i32[]} "
            "%d: i32 = div %k, %c %r: i32 = rem %k, %c yield %d, %r",
            (2,),  # not affine: tried step by step
        ),
        (
            "%c: i32 = constant {value=2, type=i32[]} "
            "%d: i32 = div %k, %c yield %d, %i",
            (0,),
        ),
    ],
)
def test_axes_an_output_tells_apart_are_parallel(out_map: str, parallel: tuple):
    assert analyze(kernel(out_map)).parallel == parallel


def test_unknown_offset_is_the_same_at_every_step():
    before = "%start: i32 = load %t[0]"
    out_map = "%s: i32 = add %i, %start yield %s, %j"
    assert analyze(kernel(out_map, before=before)).parallel == (0, 1)


def test_block_number_from_memory_makes_its_axis_sequential():
    info = analyze(kernel("%s: i32 = load %t[%i] yield %s, %j"))
    assert info.parallel == (1,)
    assert "out o  (f(i0), i1)  moves along i0 i1; own along i1" in str(info)


FIRST_ROW = """
    %row: f32[8] = constant {value=0.0, type=f32[8]}
    store %ob[0, :] = %row
"""


def test_semantics_win():
    said = '("arbitrary", "sequential", "parallel")'
    info = analyze(kernel("yield %i, %j", FIRST_ROW, semantics=said))
    assert info.parallel == (0, 2)
    assert info.axes[2].reason == "dimension_semantics says parallel"


def test_scalars_that_steps_write_are_shared_whatever_semantics_say():
    said = '("parallel", "parallel", "parallel")'
    body = "%n0: i32 = load %t[0]\nstore %t[1] = %n0\nstore %ob[:, :] = %z"
    info = analyze(kernel("yield %i, %j", body, semantics=said))
    assert info.parallel == ()
    assert "values are carried between steps in the operand t" in str(info)


def test_blocks_that_rest_and_are_read_back_are_shared_whatever_semantics_say():
    said = '("parallel", "parallel", "parallel")'
    body = "%a: f32[8,8] = load %ob[:, :]\nstore %ob[:, :] = %a"
    info = analyze(kernel("yield %i, %j", body, semantics=said))
    assert info.parallel == (0, 1)
    assert info.axes[2].reason == "values are carried between steps in the block of o"
    part = analyze(kernel("yield %i, %j", FIRST_ROW, semantics=said))
    assert part.parallel == (0, 1, 2)


@pytest.mark.parametrize(
    "out_map", ["yield %i, %j", "%h: i32 = min %k, %j yield %i, %h"]
)
def test_blocks_that_all_steps_write_whole_are_shared_whatever_semantics_say(out_map):
    info = analyze(kernel(out_map, semantics='("parallel", "arbitrary", "parallel")'))
    assert info.axes[2].reason == "values are carried between steps in the block of o"


def test_scratch_that_only_the_first_step_fills_is_shared_whatever_semantics_say():
    said = '("parallel", "parallel", "parallel")'
    body = RESET.format(id="%pk") + FIRST_ROW
    info = analyze(kernel("yield %i, %j", body, before=ACC, semantics=said))
    assert info.parallel == (0, 1)
    assert info.axes[2].reason == "values are carried between steps in the scratch acc"


def of_unknown_size(out_map: str):
    """The analysis of a kernel whose first axis has a size known only when it runs."""
    text = kernel(out_map, before="%size: i32 = load %t[0]").text
    text = text.replace("grid=(2, 3, 4)", "grid=(None, 3, 4)")
    return analyze(parse_kernel(text.replace("pipeline %x", "pipeline %size, %x")))


def test_an_axis_is_not_parallel_by_the_size_of_another_one():
    """Where `i` is clamped, `i + j` does not tell which `j` it was."""
    info = of_unknown_size("%s: i32 = add %i, %j yield %s, %i")
    assert not info.axes[1].parallel
    assert info.windows[1].own.isdisjoint({1, 2})


def test_dynamic_axis_is_parallel_where_it_is_the_only_term():
    info = of_unknown_size("yield %i, %j")
    assert info.axes[0].size is None
    assert info.axes[0].most == 8  # blocks of the output: more are clamped
    assert info.parallel == (0, 1)


@pytest.mark.parametrize(
    "out_map",
    [
        "yield %i, %j",
        "%c1: i32 = constant {value=1, type=i32[]}\n%s: i32 = xor %i, %c1 yield %s, %j",
        "%c: i32 = cast %i {dtype=i8}\n%s: i32 = cast %c {dtype=i32} yield %s, %j",
    ],
)
def test_clamped_blocks_are_not_a_steps_own(out_map):
    assert analyze(kernel(out_map, grid="(8, 3, 4)")).axes[0].parallel
    info = analyze(kernel(out_map, grid="(9, 3, 4)"))
    assert info.axes[0].reason == "several steps may write a block of o"


def test_scratch_reset_at_the_first_inner_step_carries_along_it_only():
    body = RESET.format(id="%pk") + "store %ob[:, :] = %a"
    info = analyze(kernel("yield %i, %j", body, before=ACC))
    assert info.parallel == (0, 1)
    assert str(info).endswith("ref acc  carried along i2")


def test_scratch_reset_at_an_outer_axis_carries_along_all_inner_ones():
    body = RESET.format(id="%pj") + "store %ob[:, :] = %a"
    info = analyze(kernel("yield %i, %k", body, before=ACC))
    assert info.sequential == (1, 2)
    assert info.axes[2].reason == "acc carries values along it"


def test_scratch_never_reset_makes_all_axes_sequential():
    body = "%a: f32[8,8] = load %acc[:, :] store %acc[:, :] = %a"
    info = analyze(kernel("yield %i, %j", body, before=ACC))
    assert info.sequential == (0, 1, 2)


def test_scratch_written_before_it_is_read_is_not_carried():
    body = "store %acc[:, :] = %z %a: f32[8,8] = load %acc[:, :] store %ob[:, :] = %a"
    info = analyze(kernel("yield %i, %j", body, before=ACC, grid="(2, 3, 1)"))
    assert info.parallel == (0, 1, 2)
    assert info.carries[0].axes == frozenset()


def test_partial_write_does_not_count_as_a_reset():
    body = """
        %h: f32[4,8] = constant {value=0.0, type=f32[4,8]}
        store %acc[0:+4, :] = %h
        %a: f32[8,8] = load %acc[:, :]
    """
    assert analyze(kernel("yield %i, %j", body, before=ACC)).sequential == (0, 1, 2)


def test_blocks_counted_in_elements_must_not_overlap():
    eight = "%c: i32 = constant {value=8, type=i32[]} %m: i32 = mul %i, %c yield %m, %j"
    four = eight.replace("=8", "=4")
    window = "out[element 8, 8]"
    assert analyze(kernel(eight, out_window=window)).parallel == (0, 1)
    assert analyze(kernel(four, out_window=window)).parallel == (1,)


WHOLE = "%zero: i32 = constant {value=0, type=i32[]} yield %zero, %zero"


def _triton_style(size: int, more: str = ""):
    body = f"""
        %c: i32 = constant {{value={size}, type=i32[]}}
        %at: i32 = mul %pi, %c
        %row: f32[4,8] = constant {{value=0.0, type=f32[4,8]}}
        store %ob[%at:+4, :] = %row
        {more}
    """
    return kernel(
        WHOLE,
        body,
        grid="(2,)",
        semantics='("arbitrary",)',
        ids="%i: i32",
        in_map="yield %i, %i",
    )


def test_slices_of_a_shared_block_are_told_apart():
    assert analyze(_triton_style(4)).parallel == (0,)
    assert analyze(_triton_style(3)).sequential == (0,)
    # The second start is clamped back into the block and meets the first slice.
    assert analyze(_triton_style(5)).sequential == (0,)
    neighbour = "%a: f32[4,8] = load %ob[0:+4, :]"
    assert analyze(_triton_style(4, neighbour)).sequential == (0,)


def test_operand_sharing_memory_must_move_with_the_output():
    read = "%a: f32[8,8] = load %xb[:, :] store %ob[:, :] = %a"
    args = dict(grid="(2, 3, 1)", aliases="aliases {0: 0}")
    assert analyze(kernel("yield %i, %k", read, **args)).sequential == (1,)
    same = analyze(kernel("yield %i, %j", read, in_map="yield %i, %j", **args))
    assert same.parallel == (0, 1, 2)
    args["grid"] = "(2, 3, 4)"  # the first index alone tells blocks of both apart
    partly = analyze(kernel("yield %i, %k", read, in_map="yield %i, %j", **args))
    assert partly.sequential == (1, 2)
    args["grid"] = "(2, 3, 1)"
    moved = analyze(kernel("yield %j, %i", read, in_map="yield %i, %j", **args))
    assert moved.sequential == (0, 1)
    assert (
        moved.axes[0].reason == "x and o alias, but their blocks do not move together"
    )


def test_accesses_through_an_aliased_operand_count_as_the_outputs():
    own = "store %ob[%pi:+1, :] = %row"
    other = "%c1: i32 = constant {value=1} %up: i32 = sub %pi, %c1"
    row = "%row: f32[1,8] = load %xb[%pi:+1, :]"
    above = f"{other} %row: f32[1,8] = load %xb[%up:+1, :]"
    zero = "%a: i32 = constant {value=0} yield %a, %a"
    in_map = zero.replace("%a", "%b")
    args = dict(grid="(2,)", semantics='("arbitrary",)', ids="%i: i32", in_map=in_map)
    aliased = dict(args, aliases="aliases {0: 0}")
    assert analyze(kernel(zero, f"{above} {own}", **args)).parallel == (0,)
    assert analyze(kernel(zero, f"{row} {own}", **aliased)).parallel == (0,)
    assert analyze(kernel(zero, f"{above} {own}", **aliased)).sequential == (0,)


def test_no_grid():
    info = analyze(
        kernel(
            WHOLE,
            grid="()",
            semantics="()",
            ids="",
            in_map="%y: i32 = constant {value=0, type=i32[]} yield %y, %y",
        )
    )
    assert info.axes == ()
    assert str(info).startswith("no grid: one step")


def test_map_that_chooses_between_indices_depends_on_both():
    """Values that reach the result as yields of a branch only."""
    out_map = """
        %none: i32 = constant {value=0}
        %s: i32 = cond %k
          branch () { yield %i }
          branch () { yield %none }
        yield %s, %j
    """
    info = analyze(kernel(out_map))
    assert info.windows[1].axes == {0, 1, 2}
    assert info.parallel == (1,)


def test_two_unknown_offsets_are_not_taken_for_one():
    def rows(first: str, second: str):
        body = f"""
            %a: i32 = load %t[0]
            %b: i32 = load %t[1]
            %c: i32 = constant {{value=4}}
            %at: i32 = mul %pi, %c
            %u: i32 = add %at, {first}
            %v: i32 = add %at, {second}
            %row: f32[4,8] = constant {{value=0.0}}
            %m: bool[4,8] = constant {{value=True}}
            store %ob[%u:+4, :] = %row mask %m
            store %ob[%v:+4, :] = %row mask %m
        """
        return kernel(
            WHOLE,
            body,
            grid="(2,)",
            semantics='("arbitrary",)',
            ids="%i: i32",
            in_map="yield %i, %i",
        )

    assert analyze(rows("%a", "%b")).sequential == (0,)


@pytest.mark.parametrize("space", ["any", "hbm", "gmem"])
def test_a_result_without_a_window_that_every_step_writes(space):
    """The last one stays: it is an array, not scratch that each step fills anew."""

    def info(store: str):
        return analyze(
            parse_kernel(f"""
        kernel @k(%o: ref<f32[4,8] {space}>) outputs 1 {{
          pipeline {{grid=(4,), semantics=("arbitrary",), windows=()}}
            body (%i: i32) {{
              {store}
            }}
        }}
    """)
        )

    all_rows = "%z: f32[4,8] = constant {value=0.0} store %o[:, :] = %z"
    one_row = "%z: f32[8] = constant {value=0.0} store %o[%i, :] = %z"
    assert info(all_rows).sequential == (0,)
    assert info(one_row).parallel == (0,)


def test_one_body_is_analysed_once():
    first = kernel("yield %i, %j", aliases="aliases {0: 0}", in_map="yield %i, %j")
    assert analyze(first.with_(name="other")) is analyze(first)
    assert analyze(first.with_(aliases=())) is not analyze(first)


def test_axes_of_windows_alone():
    found = kernel("%s: i32 = constant {value=7} %c: i32 = min %j, %s yield %i, %c")
    moves = [window.axes for window in analyze(found).windows]
    assert window_axes(find_pipeline(found)) == moves == [{0, 2}, {0, 1}]
