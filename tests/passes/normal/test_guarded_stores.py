"""A mask that is one number for all elements, as a branch."""

import pytest

from pallasite.passes.normal.guarded_stores import guarded_stores
from tests.passes.normal.test_values import check, kernel, same

LANES = """
    %l: i32[8] = iota {dim=0, type=i32[8]}
    %five: i32[8] = constant {value=5}
    %m: bool[8] = lt %l, %five
"""
ROW = """
    %r: i32 = load %n[0]
    %two: i32 = constant {value=2}
    %p: bool = lt %r, %two
    %q: bool[8] = broadcast_in_dim %p {shape=(8,), dims=()}
"""
REFS = "n: i32[1]", "x: f32[8]", "o: f32[8]"


def test_what_is_only_for_the_store_is_in_the_branch():
    old = kernel(
        LANES
        + ROW
        + """
        %b: bool[8] = and %m, %q
        %z: f32[8] = constant {value=0.0}
        %v: f32[8] = load %x[:] mask %b other %z
        %e: f32[8] = exp %v
        store %o[:] = %e mask %b
        """,
        *REFS,
    )
    check(
        guarded_stores,
        old,
        """
        %r: i32 = load %n[0]
        %two: i32 = constant {value=2}
        %p: bool = lt %r, %two
        %w: i32 = cast %p {dtype=i32}
        cond %w
          branch () {}
          branch () {
            %l: i32[8] = iota {dim=0}
            %five: i32[8] = constant {value=5}
            %m: bool[8] = lt %l, %five
            %z: f32[8] = constant {value=0.0}
            %v: f32[8] = load %x[:] mask %m other %z
            %e: f32[8] = exp %v
            store %o[:] = %e mask %m
          }
        """,
    )


def test_a_load_stays_before_a_store_that_follows_it():
    old = kernel(
        ROW
        + """
        %v: f32[8] = load %o[:]
        %w: f32[8] = load %x[:]
        store %o[:] = %w
        store %o[:] = %v mask %q
        """,
        *REFS,
    )
    new = guarded_stores(old)
    load, *_ = [
        op for op in new.body.ops if op.name == "load" and op.results[0].tile.shape
    ]
    assert load.operands[0] is new.params[2]
    names = [op.name for op in new.body.ops if op.name in ("load", "store", "cond")]
    assert names == ["load", "load", "load", "store", "cond"]


def test_a_value_that_others_need_stays():
    old = kernel(
        ROW
        + """
        %w: f32[8] = load %x[:]
        %e: f32[8] = exp %w
        store %o[:] = %e mask %q
        store %s[:] = %e
        """,
        "n: i32[1]", "x: f32[8]", "o: f32[8]", "s: f32[8]",
    )  # fmt: skip
    assert [op.name for op in guarded_stores(old).body.ops if op.name == "exp"]


@pytest.mark.parametrize("mask", ["%m", "%b"])
def test_masks_that_differ_stay(mask: str):
    """Also an exclusive or of both kinds, which no guard splits."""
    old = kernel(
        LANES
        + ROW
        + f"""
        %b: bool[8] = or %m, %q
        %w: f32[8] = load %x[:]
        store %o[:] = %w mask {mask}
        """,
        *REFS,
    )
    same(guarded_stores, old)
