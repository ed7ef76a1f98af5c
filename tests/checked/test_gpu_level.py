"""The explicit GPU level: two right kernels, and what is found when one line is wrong.

The ring is a product whose operands one role loads and another, of two warpgroups,
multiplies; its result leaves through shared memory. The chain is a loop of two
products, as in attention, by two roles that share what a third loads.
"""

import re

import ml_dtypes
import numpy as np
import pytest

import pallasite as pl
from pallasite.backends import base
from pallasite.backends.cuda import BACKEND
from pallasite.errors import CheckError, VerifyError
from pallasite.interpret.checked import run_checked
from pallasite.ir.text import parse_kernel, print_kernel
from pallasite.ir.verify import verify
from tests.backends.cuda import test_emit as cuda

ORDERS = ("early", "late", *range(6))

# ruff: noqa: E501
RING = """
kernel @ring(%x: ref<f32[8,20] any>, %y: ref<f32[20,8] any>, %o: ref<f32[8,8] any>) outputs 1 level explicit {
  %a: ref<f32[2,8,4] smem @swizzle(128)> = alloc
  %b: ref<f32[2,4,8] smem @swizzle(128)> = alloc
  %out: ref<f32[8,8] smem> = alloc
  %full: ref<i32[2] mbarrier @arrivals(1)> = alloc
  %empty: ref<i32[2] mbarrier @arrivals(8)> = alloc
  %0: i32 = constant {value=0}
  %1: i32 = constant {value=1}
  %2: i32 = constant {value=2}
  %4: i32 = constant {value=4}
  %n: i32 = constant {value=5}
  roles {cuda.names=("load", "compute"), cuda.warpgroups=(1, 2)}
    body () {
      for %0, %n, %1
        body (%i: i32) {
          %s: i32 = rem %i, %2
          %t: i32 = div %i, %2
          %p: i32 = rem %t, %2
          %q: i32 = sub %1, %p
          %other: i32 = sub %1, %s
          %es: ref<i32 mbarrier @arrivals(8)> = subview %empty[%s]
          %fs: ref<i32 mbarrier @arrivals(1)> = subview %full[%s]
          %ft: ref<i32 mbarrier @arrivals(1)> = subview %full[%other]
          %k: i32 = mul %i, %4
          %xk: ref<f32[8,4] any> = subview %x[:, %k:+4]
          %yk: ref<f32[4,8] any> = subview %y[%k:+4, :]
          %as: ref<f32[8,4] smem @swizzle(128)> = subview %a[%s, :, :]
          %bs: ref<f32[4,8] smem @swizzle(128)> = subview %b[%s, :, :]
          barrier_wait %es, %q loc("ring.py":1)
          barrier_expect %fs {bytes=256} loc("ring.py":2)
          copy_start %xk, %as, %fs {priority=0} loc("ring.py":3)
          copy_start %yk, %bs, %fs {priority=0} loc("ring.py":4)
        }
    }
    body () {
      %zero: f32[8,8] = constant {value=0.0}
      %sums: f32[8,8] = for %0, %n, %1, %zero
        body (%j: i32, %acc: f32[8,8]) {
          %u: i32 = rem %j, %2
          %v: i32 = div %j, %2
          %w: i32 = rem %v, %2
          %z: i32 = sub %1, %w
          %eu: ref<i32 mbarrier @arrivals(8)> = subview %empty[%u]
          %fu: ref<i32 mbarrier @arrivals(1)> = subview %full[%u]
          %au: ref<f32[8,4] smem @swizzle(128)> = subview %a[%u, :, :]
          %bu: ref<f32[4,8] smem @swizzle(128)> = subview %b[%u, :, :]
          barrier_wait %fu, %w loc("ring.py":5)
          %new: f32[8,8] = wgmma %acc, %au, %bu {contract=((1,), (0,))} loc("ring.py":6)
          wgmma_wait {pending=0} loc("ring.py":7)
          barrier_arrive %eu loc("ring.py":8)
          yield %new
        }
      %done: f32[8,8] = wgmma_wait %sums {pending=0} loc("ring.py":9)
      store %out[:, :] = %done loc("ring.py":10)
      fence_async loc("ring.py":11)
      copy_start %out, %o {priority=0} loc("ring.py":12)
      bulk_commit loc("ring.py":13)
      bulk_wait {pending=0, read=True} loc("ring.py":14)
    }
}
"""

CHAIN = """
kernel @chain(%q: ref<f32[16,4] any>, %k: ref<f32[32,4] any>, %v: ref<f32[32,4] any>, %o: ref<f32[16,4] any>) outputs 1 level explicit {
  %qs: ref<f32[16,4] smem @swizzle(128)> = alloc
  %ks: ref<f32[2,8,4] smem @swizzle(128)> = alloc
  %vs: ref<f32[2,8,4] smem @swizzle(128)> = alloc
  %ps: ref<f32[16,8] smem @swizzle(128)> = alloc
  %qfull: ref<i32[1] mbarrier @arrivals(1)> = alloc
  %kfull: ref<i32[2] mbarrier @arrivals(1)> = alloc
  %vfull: ref<i32[2] mbarrier @arrivals(1)> = alloc
  %kfree: ref<i32[2] mbarrier @arrivals(8)> = alloc
  %vfree: ref<i32[2] mbarrier @arrivals(8)> = alloc
  %q0: ref<i32 mbarrier @arrivals(1)> = subview %qfull[0]
  %0: i32 = constant {value=0}
  %1: i32 = constant {value=1}
  %2: i32 = constant {value=2}
  %8: i32 = constant {value=8}
  %n: i32 = constant {value=4}
  roles {cuda.names=("load", "first", "second"), cuda.warpgroups=(1, 1, 1)}
    body () {
      barrier_expect %q0 {bytes=256}
      copy_start %q, %qs, %q0 {priority=0} loc("chain.py":1)
      for %0, %n, %1
        body (%i: i32) {
          %s: i32 = rem %i, %2
          %t: i32 = div %i, %2
          %u: i32 = rem %t, %2
          %w: i32 = sub %1, %u
          %at: i32 = mul %i, %8
          %kf: ref<i32 mbarrier @arrivals(1)> = subview %kfull[%s]
          %vf: ref<i32 mbarrier @arrivals(1)> = subview %vfull[%s]
          %ke: ref<i32 mbarrier @arrivals(8)> = subview %kfree[%s]
          %ve: ref<i32 mbarrier @arrivals(8)> = subview %vfree[%s]
          %kt: ref<f32[8,4] any> = subview %k[%at:+8, :]
          %vt: ref<f32[8,4] any> = subview %v[%at:+8, :]
          %kd: ref<f32[8,4] smem @swizzle(128)> = subview %ks[%s, :, :]
          %vd: ref<f32[8,4] smem @swizzle(128)> = subview %vs[%s, :, :]
          barrier_wait %ke, %w loc("chain.py":2)
          barrier_expect %kf {bytes=128} loc("chain.py":3)
          copy_start %kt, %kd, %kf {priority=0} loc("chain.py":4)
          barrier_wait %ve, %w loc("chain.py":5)
          barrier_expect %vf {bytes=128} loc("chain.py":6)
          copy_start %vt, %vd, %vf {priority=0} loc("chain.py":7)
        }
    }
    ROLE(0)
    ROLE(8)
}
"""

ROLE = """
    body () {
      %qa: ref<f32[8,4] smem @swizzle(128)> = subview %qs[FIRST:+8, :]
      %pa: ref<f32[8,8] smem @swizzle(128)> = subview %ps[FIRST:+8, :]
      %none: f32[8,8] = constant {value=0.0}
      %zero: f32[8,4] = constant {value=0.0}
      barrier_wait %q0, %0 loc("chain.py":8)
      %sums: f32[8,4] = for %0, %n, %1, %zero
        body (%j: i32, %acc: f32[8,4]) {
          %s: i32 = rem %j, %2
          %t: i32 = div %j, %2
          %u: i32 = rem %t, %2
          %kf: ref<i32 mbarrier @arrivals(1)> = subview %kfull[%s]
          %vf: ref<i32 mbarrier @arrivals(1)> = subview %vfull[%s]
          %ke: ref<i32 mbarrier @arrivals(8)> = subview %kfree[%s]
          %ve: ref<i32 mbarrier @arrivals(8)> = subview %vfree[%s]
          %kd: ref<f32[8,4] smem @swizzle(128)> = subview %ks[%s, :, :]
          %vd: ref<f32[8,4] smem @swizzle(128)> = subview %vs[%s, :, :]
          barrier_wait %kf, %u loc("chain.py":9)
          %flying: f32[8,8] = wgmma %none, %qa, %kd {contract=((1,), (1,))} loc("chain.py":10)
          %scores: f32[8,8] = wgmma_wait %flying {pending=0} loc("chain.py":11)
          barrier_arrive %ke loc("chain.py":12)
          %e: f32[8,8] = tanh %scores
          named_barrier {id=IDENT, threads=128, arrive_only=False} loc("chain.py":13)
          store %pa[:, :] = %e loc("chain.py":14)
          fence_async loc("chain.py":15)
          barrier_wait %vf, %u loc("chain.py":16)
          %more: f32[8,4] = wgmma %acc, %pa, %vd {contract=((1,), (0,))} loc("chain.py":17)
          %added: f32[8,4] = wgmma_wait %more {pending=0} loc("chain.py":18)
          barrier_arrive %ve loc("chain.py":19)
          yield %added
        }
      %oa: ref<f32[8,4] any> = subview %o[FIRST:+8, :]
      store %oa[:, :] = %sums loc("chain.py":20)
    }
"""


def _role(first: int) -> str:
    """The text of a role, with names of its own."""
    code = ROLE.replace("FIRST", str(first)).replace("IDENT", str(1 + first // 8))
    own = set(re.findall(r"%(\w+): ", code))
    return re.sub(
        r"%(\w+)", lambda m: f"%{m[1]}_{first}" if m[1] in own else m[0], code
    )


CHAIN = CHAIN.replace("ROLE(0)", _role(0)).replace("ROLE(8)", _role(8))


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


def run(text: str, order) -> np.ndarray:
    kernel = parse_kernel(text)
    verify(kernel)
    assert parse_kernel(print_kernel(kernel)) == kernel
    shapes = [p.ref.shape for p in kernel.inputs]
    return run_checked(kernel, arrays(*shapes), pl.Checked(orders=(order,)))[0]


def test_the_ring_is_right_in_every_order():
    x, y = arrays((8, 20), (20, 8))
    for order in ORDERS:
        np.testing.assert_allclose(run(RING, order), x @ y, rtol=1e-5, atol=1e-5)


def test_the_chain_is_right_in_every_order():
    q, k, v = arrays((16, 4), (32, 4), (32, 4))
    for order in ORDERS:
        got = run(CHAIN, order)
        np.testing.assert_allclose(got, np.tanh(q @ k.T) @ v, rtol=1e-4, atol=1e-4)


WRONG = {
    # name: (text, what is replaced, by what, what the report says, lines it names)
    "slot refilled unwaited": (
        RING, 'barrier_wait %es, %q loc("ring.py":1)', "",
        r"operand of a wgmma is written|data race|destination of",
        ("ring.py:3",),
    ),
    "slot read before it is full": (
        RING, 'barrier_wait %fu, %w loc("ring.py":5)', "",
        r"destination of a copy is read|data race|undefined value|more arrivals",
        ("ring.py:",),
    ),
    "full: wrong parity": (
        RING, "barrier_wait %fu, %w", "barrier_wait %fu, %z",
        r"destination of a copy is read|data race|undefined value|more arrivals"
        r"|a barrier phase completes before a wait",
        ("ring.py:",),
    ),
    "empty: wrong parity": (
        RING, "barrier_wait %es, %q", "barrier_wait %es, %p",
        "deadlock: everything that runs", ("ring.py:1", "ring.py:5"),
    ),
    "too few bytes expected": (
        RING, "bytes=256", "bytes=128", "expects fewer bytes than its copies bring",
        ("ring.py:",),
    ),
    "too many bytes expected": (
        RING, "bytes=256", "bytes=512",
        "256 bytes missing", ("ring.py:5",),
    ),
    "slot never freed": (
        RING, 'barrier_arrive %eu loc("ring.py":8)', "",
        "0 of 8 arrivals", ("ring.py:1", "ring.py:5"),
    ),
    "more arrivals counted than come": (
        RING, "@arrivals(8)", "@arrivals(12)", "8 of 12 arrivals", ("ring.py:1",),
    ),
    "fewer arrivals counted than come": (
        RING, "@arrivals(8)", "@arrivals(4)",
        "more arrivals at a barrier than its phase expects", ("ring.py:8",),
    ),
    "slot freed before its product was waited for": (
        RING, "wgmma_wait {pending=0}", "wgmma_wait {pending=1}",
        r"left operand of a wgmma is written|data race", ("ring.py:3", "ring.py:6"),
    ),
    "a copy counted by the other slot's barrier": (
        RING, "copy_start %yk, %bs, %fs", "copy_start %yk, %bs, %ft",
        r"128 bytes missing|fewer bytes|destination of a copy|data race",
        ("ring.py:",),
    ),
    "the sums are used before their wait": (
        RING, '%done: f32[8,8] = wgmma_wait %sums {pending=0} loc("ring.py":9)\n'
        "      store %out[:, :] = %done", "store %out[:, :] = %sums",
        "store uses a matmul in flight", ("ring.py:10",),
    ),
    "the last wait leaves a product in flight": (
        RING.replace('wgmma_wait {pending=0} loc("ring.py":7)', "")
        .replace('barrier_arrive %eu loc("ring.py":8)', "")
        .replace("%n: i32 = constant {value=5}", "%n: i32 = constant {value=2}"),
        "wgmma_wait %sums {pending=0}", "wgmma_wait %sums {pending=1}",
        "an accumulator whose matmul is still in flight", ("ring.py:9", "ring.py:6"),
    ),
    "no fence before the store by the copy engine": (
        RING, 'fence_async loc("ring.py":11)', "",
        "the copy engine reads what a store wrote, without a fence",
        ("ring.py:12", "ring.py:10"),
    ),
    "no wait for the store by the copy engine": (
        RING, 'bulk_wait {pending=0, read=True} loc("ring.py":14)', "",
        "is still in flight at the end of its memory's lifetime|never waited for", ("ring.py:12",),
    ),
    "a store in no group": (
        RING, 'bulk_commit loc("ring.py":13)', "",
        "is still in flight at the end of its memory's lifetime|never waited for", ("ring.py:12",),
    ),
    "a wait that leaves a group": (
        RING, "bulk_wait {pending=0,", "bulk_wait {pending=1,",
        "is still in flight at the end of its memory's lifetime|never waited for", ("ring.py:12",),
    ),
    "shared memory reused before the copy engine has read it": (
        RING, 'bulk_commit loc("ring.py":13)',
        'bulk_commit\nstore %out[:, :] = %zero loc("ring.py":15)',
        "the source of a copy is written before", ("ring.py:12", "ring.py:15"),
    ),
    "two arrivals for one phase": (
        RING, 'barrier_expect %fs {bytes=256} loc("ring.py":2)',
        'barrier_expect %fs {bytes=256} loc("ring.py":2)\nbarrier_expect %fs {bytes=0} '
        'loc("ring.py":15)',
        "more arrivals at a barrier", ("ring.py:15",),
    ),
    "an arrival where nobody waits for the phase": (
        RING, "%n: i32 = constant {value=5}\n  roles",
        "%n: i32 = constant {value=5}\n  %f0: ref<i32 mbarrier @arrivals(1)> = "
        "subview %full[0]\n  barrier_expect %f0 {bytes=0}\n  roles",
        r"destination of a copy is read|data race|undefined value|more arrivals"
        r"|a barrier phase completes before a wait|fewer bytes",
        ("ring.py:",),
    ),
    "keys freed before the scores are there": (
        CHAIN, '%scores_0: f32[8,8] = wgmma_wait %flying_0 {pending=0} loc("chain.py":11)\n'
        '          barrier_arrive %ke_0 loc("chain.py":12)',
        'barrier_arrive %ke_0 loc("chain.py":12)\n'
        '%scores_0: f32[8,8] = wgmma_wait %flying_0 {pending=0} loc("chain.py":11)',
        "right operand of a wgmma is written|data race",
        ("chain.py:4", "chain.py:10"),
    ),
    "values multiplied before they are there": (
        CHAIN, 'barrier_wait %vf_8, %u_8 loc("chain.py":16)', "",
        "data race|destination of a copy is read|undefined value", ("chain.py:7",),
    ),
    "the query is not waited for": (
        CHAIN, 'barrier_wait %q0, %0 loc("chain.py":8)', "",
        "data race|destination of a copy is read", ("chain.py:1",),
    ),
    "one of two roles frees a slot": (
        CHAIN.replace("mbarrier @arrivals(8)", "mbarrier @arrivals(4)"),
        'barrier_arrive %ke_8 loc("chain.py":12)', "",
        "right operand of a wgmma is written|data race", ("chain.py:4", "chain.py:10"),
    ),
    "no fence before a product reads what was stored": (
        CHAIN, 'fence_async loc("chain.py":15)', "",
        "a wgmma reads what a store wrote, without a fence", ("chain.py:17", "chain.py:14"),
    ),
    "a role stores into what the other multiplies": (
        CHAIN, "%pa_8: ref<f32[8,8] smem @swizzle(128)> = subview %ps[8:+8, :]",
        "%pa_8: ref<f32[8,8] smem @swizzle(128)> = subview %ps[4:+8, :]",
        "left operand of a wgmma is written|data race|without a fence", ("chain.py:14",),
    ),
    "a named barrier counts threads that never come": (
        CHAIN, "threads=128", "threads=256",
        "128 of 256 threads", ("chain.py:13",),
    ),
    "a role that ends a step early": (
        CHAIN, "%sums_8: f32[8,4] = for %0, %n,", "%sums_8: f32[8,4] = for %1, %n,",
        "waits for phase|data race", ("chain.py:",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_one_wrong_line_is_found(name):
    text, old, new, message, lines = WRONG[name]
    assert old in text
    if name == "the last wait leaves a product in flight":
        run(text, "early")  # right with the line as it was
    reports = []
    for order in pl.Checked().orders:
        try:
            run(text.replace(old, new), order)
        except (CheckError, VerifyError) as error:
            reports.append(error)
    assert reports, "found in no order"
    # In some orders what follows from it is found first.
    texts = [str(error) for error in reports]
    named = [t for t in texts if all(line in t for line in lines)]
    assert any(re.search(message, t) for t in named), "\n".join(texts)


def test_a_product_left_in_flight_ends_with_its_memory():
    """Where `copies` are not reported, what nothing waits for is done all the same."""
    spare = """
      %a0: ref<f32[8,4] smem @swizzle(128)> = subview %a[0, :, :]
      %b0: ref<f32[4,8] smem @swizzle(128)> = subview %b[0, :, :]
      %spare: f32[8,8] = wgmma %zero, %a0, %b0 {contract=((1,), (0,))}
      store %out"""
    kernel = parse_kernel(RING.replace("store %out", spare))
    x, y = arrays((8, 20), (20, 8))
    options = pl.Checked(orders=("late",), copies=False)
    (got,) = run_checked(kernel, [x, y], options)
    np.testing.assert_allclose(got, x @ y, rtol=1e-5, atol=1e-5)


# --- what the cuda backend makes ---


@pytest.mark.parametrize("order", pl.Checked().orders)
def test_a_specialised_matmul_is_right(order):
    scheduled = _scheduled(cuda.matmul(256, 128, 512, block=(128, 128, 64)))
    x, y = (_bf16(a) for a in arrays((256, 512), (512, 128)))
    (got,) = run_checked(scheduled, [x, y], pl.Checked(orders=(order,)))
    want = x.astype(np.float32) @ y.astype(np.float32)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2e-2, atol=0.5)


@pytest.mark.parametrize("order", ("early", "late"))
def test_specialised_attention_is_right(order):
    scheduled = _scheduled(cuda.attention(heads=1, length=384))
    operands = [_bf16(a) for a in arrays(*[(1, 384, 128)] * 3)]
    run_checked(scheduled, operands, pl.Checked(orders=(order,)))


def _scheduled(kernel):
    return base.Compiled(BACKEND, kernel, base.Options()).scheduled


def _bf16(array):
    return array.astype(ml_dtypes.bfloat16)


# --- rules of the verifier ---

HEAD = (
    "kernel @k(%x: ref<f32[8,8] any>, %o: ref<f32[8,8] any>) outputs 1 level explicit"
)
PRODUCT = """
  %a: ref<f32[8,8] smem> = alloc
  %z: f32[8,8] = constant {value=0.0}
  %p: f32[8,8] = wgmma %z, %a, %a {contract=((1,), (0,))}
"""


@pytest.mark.parametrize(
    "code, message",
    [
        (PRODUCT + "%q: f32[8,8] = add %p, %p", "add uses a matmul in flight"),
        (PRODUCT + "%q: f32[8,8] = wgmma %z, %p, %a {contract=((1,), (0,))}",
         "wgmma uses a matmul in flight"),
        ("%b: ref<i32[2] mbarrier> = alloc", "needs @arrivals"),
        ("%b: ref<i32 sem> = alloc\nbarrier_arrive %b", "is not an mbarrier"),
        ("%b: ref<i32[2] mbarrier @arrivals(1)> = alloc\nbarrier_arrive %b",
         "is 2 barriers, not one"),
        ("%b: ref<i32 mbarrier @arrivals(1)> = alloc\n%1: i32 = constant {value=1}\n"
         "sem_wait %b, %1", "barrier_arrive, barrier_wait"),
        ("%b: ref<i32 mbarrier @arrivals(1)> = alloc\n"
         "copy_start %x, %o, %b {priority=0}", "is not in shared memory"),
        ("%z: f32[8,8] = constant {value=0.0}\n"
         "%p: f32[8,8] = wgmma %z, %x, %x {contract=((1,), (0,))}",
         "is not in shared memory"),
    ],
)  # fmt: skip
def test_the_verifier_refuses(code, message):
    kernel = parse_kernel(f"{HEAD} {{\n{code}\n}}")
    with pytest.raises(VerifyError, match=message):
        verify(kernel)
