"""fuse_dot_sums: dots that add as they go, by text and by meaning."""

import numpy as np
import pytest

from pallasite.backends.cpu import passes_for
from pallasite.backends.cpu.dot.fusion import fuse_dot_sums
from pallasite.ir.text import parse_kernel, print_kernel
from pallasite.ir.verify import verify
from pallasite.passes.run import SHARED, Pass, run
from pallasite.target import host
from tests.fuzz.agreement import run_numpy, same
from tests.fuzz.choices import Seeded
from tests.fuzz.generate import random_kernel

DOT = "{contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}"
FUSED = DOT.removesuffix("}")


def kernel(body: str) -> str:
    return f"""kernel @k(%x: ref<f32[8,4] any>, %y: ref<f32[4,8] any>, %c: ref<i32 smem>, %o: ref<f32[8,8] any>) outputs 1 {{
  %a: f32[8,4] = load %x[:, :]
  %b: f32[4,8] = load %y[:, :]
  {body}
}}"""  # noqa: E501


CASES = {
    "a sum that is used": (
        f"""%s: f32[8,8] = load %o[:, :]
  %p: f32[8,8] = dot %a, %b {DOT}
  %t: f32[8,8] = add %s, %p
  %e: f32[8,8] = exp %t
  store %o[:, :] = %e""",
        ["dot_add %a, %b, %s " + FUSED + ", scaled=False}"],
        ["add %s"],
    ),
    "a sum that is stored elsewhere": (
        f"""%s: f32[8,8] = constant {{value=1.0}}
  %p: f32[8,8] = dot %a, %b {DOT}
  %t: f32[8,8] = add %p, %s
  store %o[:, :] = %t""",
        ["dot_store %a, %b, %o, %s", "addend=True, scaled=False, overwrite=False"],
        ["add %", "store %o["],
    ),
    "a sum in place": (
        f"""%s: f32[8,8] = load %o[:, :]
  %p: f32[8,8] = dot %a, %b {DOT}
  %t: f32[8,8] = add %s, %p
  store %o[:, :] = %t""",
        ["dot_store %a, %b, %o ", "addend=False, scaled=False, overwrite=False"],
        ["add %"],
    ),
    "a sum that a branch sets to zero": (
        f"""%w: i32 = load %c[]
  cond %w
    branch () {{ }}
    branch () {{
      %z: f32[8,8] = constant {{value=0.0}}
      store %o[:, :] = %z
    }}
  %s: f32[8,8] = load %o[:, :]
  %p: f32[8,8] = dot %a, %b {DOT}
  %t: f32[8,8] = add %s, %p
  store %o[:, :] = %t""",
        ["dot_store %a, %b, %o, %w ", "overwrite=True"],
        ["store %o["],
    ),
    "rows times factors": (
        f"""%s: f32[8,8] = load %o[:, :]
  %f: f32[8] = constant {{value=0.5}}
  %g: f32[8,8] = broadcast_in_dim %f {{shape=(8, 8), dims=(0,)}}
  %m: f32[8,8] = mul %s, %g
  %p: f32[8,8] = dot %a, %b {DOT}
  %t: f32[8,8] = add %m, %p
  store %o[:, :] = %t""",
        ["dot_store %a, %b, %o, %m, %s, %f", "addend=True, scaled=True"],
        ["add %"],
    ),
    "a product that is used twice": (
        f"""%p: f32[8,8] = dot %a, %b {DOT}
  %t: f32[8,8] = add %p, %p
  store %o[:, :] = %t""",
        ["dot %a, %b", "add %p, %p", "store %o["],
        ["dot_"],
    ),
    "a ref written between": (
        f"""%s: f32[8,8] = load %o[:, :]
  %z: f32[8,8] = constant {{value=0.0}}
  store %o[:, :] = %z
  %p: f32[8,8] = dot %a, %b {DOT}
  %t: f32[8,8] = add %s, %p
  store %o[:, :] = %t""",
        ["dot_store %a, %b, %o, %s", "addend=True"],
        ["add %"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name: str):
    body, present, absent = CASES[name]
    before = parse_kernel(kernel(body))
    verify(before)
    after = fuse_dot_sums(before)
    verify(after)
    text = print_kernel(after)
    assert print_kernel(parse_kernel(text)) == text
    assert all(part in text for part in present), text
    assert not any(part in text for part in absent), text
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=s).astype(np.float32) for s in ((8, 4), (4, 8)))
    for which in (0, 1):
        arrays = [x, y, np.int32(which)]
        for got, want in zip(
            run_numpy(after, arrays), run_numpy(before, arrays), strict=True
        ):
            assert same(got, want).all()


@pytest.mark.parametrize("seed", range(40))
def test_random_products_keep_their_meaning(seed: int):
    case = random_kernel(Seeded(seed), "products")
    own = [step for step in passes_for(host()) if step.name != "fuse_dot_sums"]
    before = run(case.kernel, [*SHARED, *own])
    after = run(before, [Pass("fuse_dot_sums", fuse_dot_sums)])
    arrays = [*case.arrays]
    for got, want in zip(
        run_numpy(after, arrays), run_numpy(before, arrays), strict=True
    ):
        assert same(got, want).all()
