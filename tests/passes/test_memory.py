"""Which memory refs reach, and which refs code reads and writes."""

from pallasite.ir.nodes import walk
from pallasite.ir.roles import Pipeline
from pallasite.ir.text import parse_kernel
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.memory import Roots, read_refs, root_among, written_refs

KERNEL = parse_kernel("""
    kernel @k(%x: ref<f32[32] any>, %y: ref<f32[32] any>, %o: ref<f32[32] any>)
        outputs 1 aliases {1: 0} {
      %acc: ref<f32[8] vmem> = alloc {type=ref<f32[8] vmem>}
      %sem: ref<i32[] dma_sem> = alloc {type=ref<i32[] dma_sem>}
      pipeline %x, %o {grid=(4,), windows=(in[8], out[8]), semantics=("arbitrary",)}
        map (%a: i32) { yield %a }
        map (%b: i32) { yield %b }
        body (%i: i32, %xb: ref<f32[8] block>, %ob: ref<f32[8] block>) {
          copy_start %xb, %acc, %sem {priority=0}
          copy_wait %xb, %acc, %sem
          %part: ref<f32[4] block> = subview %ob[0:+4]
          %view: ref<f32[2,2] block> = reshape_view %part {shape=(2, 2)}
          %v: f32[2,2] = load %view[:, :]
          store %view[:, :] = %v
        }
    }
""")
PIPELINE = Pipeline.of(find_pipeline(KERNEL))


def names(values) -> set[str]:
    return {v.name for v in values}


def refs() -> dict:
    found = [v for op in walk(KERNEL.body) for v in (*op.results, *op.operands)]
    return {v.name: v for v in (*found, *KERNEL.params, *PIPELINE.body.params)}


def test_roots():
    roots, ref = Roots(KERNEL), refs()
    expected = {"view": "y", "part": "y", "ob": "y", "o": "y", "xb": "x", "acc": "acc"}
    assert {name: roots.of(ref[name]).name for name in expected} == expected


def test_roots_of_a_block_end_at_its_parameters():
    roots, ref = Roots(PIPELINE.body), refs()
    assert roots.of(ref["view"]) is ref["ob"]
    assert names(roots.reached([ref["view"]])) == {"view", "part", "ob"}
    outer = Roots(KERNEL.body, windows=False)
    assert outer.of(ref["view"]) is ref["ob"]


def test_what_ops_read_and_write():
    found = {op.name: (read_refs(op), written_refs(op)) for op in walk(KERNEL.body)}
    shown = {name: (names(r), names(w)) for name, (r, w) in found.items() if r or w}
    assert shown == {
        "pipeline": ({"x"}, {"o"}),
        "copy_start": ({"xb"}, {"acc", "sem"}),
        "copy_wait": ({"xb"}, {"acc", "sem"}),
        "load": ({"view"}, set()),
        "store": (set(), {"view"}),
    }


def test_what_a_region_writes():
    roots = Roots(KERNEL)
    assert names(roots.written(PIPELINE.body)) == {"y", "acc", "sem"}
    assert names(roots.written(KERNEL.body)) == {"y"}
    every = {"view", "part", "ob", "o", "y", "acc", "sem"}
    assert names(roots.all_written(KERNEL.body)) == every


def test_root_among_producers():
    made = {op.result: op for op in PIPELINE.body.ops if op.results}
    assert root_among(made, refs()["view"]).name == "ob"
