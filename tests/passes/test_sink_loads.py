"""sink_loads: texts before and after."""

from pallasite.ir.text import parse_kernel, print_kernel
from pallasite.passes.optimise.sink_loads import sink_loads


def kernel(body: str, aliases: str = "") -> str:
    return f"""
    kernel @norm(%x: ref<f32[64,256] any>, %w: ref<bf16[1,256] any>,
                 %o: ref<f32[64,256] any>) outputs 1{aliases} {{
      pipeline {{grid=(64,), windows=(), semantics=("parallel",)}}
        body (%i: i32) {{
          %c: i32 = constant {{value=0}}
          %xb: ref<f32[1,256] block> = block_view %x, %i, %c {{window=in[1, 256]}}
          %ob: ref<f32[1,256] block> = block_view %o, %i, %c {{window=out[1, 256]}}
          {body}
        }}
    }}"""


NORM = """%a: f32[1,256] = load %xb[:, :]
          %b: bf16[1,256] = load %w[:, :]
          %d: f32[1,256] = cast %b {dtype=f32}
          %s: f32[1] = reduce %a {kind="sum", axes=(1,)}
          %t: f32[1,256] = broadcast_in_dim %s {shape=(1, 256), dims=(0,)}
          %u: f32[1,256] = mul %a, %t
          %v: f32[1,256] = mul %u, %d
          store %ob[:, :] = %v"""


def order(text: str) -> list[str]:
    """The names of the ops of a program, in order."""
    made = sink_loads(parse_kernel(text))
    (pipeline,) = made.body.ops
    return [op.name for op in pipeline.regions[-1].ops][3:]


def test_weights_are_loaded_after_the_reduction():
    assert order(kernel(NORM)) == [
        *("load", "reduce", "broadcast_in_dim", "mul"),
        *("load", "cast", "mul", "store"),
    ]


def test_what_is_written_stays():
    """A load of an array that the kernel writes reads what is there at that time."""
    body = NORM.replace("load %w[:, :]", "load %ob[:, :]").replace("bf16", "f32")
    body = body.replace("cast %b {dtype=f32}", "neg %b")
    before = parse_kernel(kernel(body))
    assert sink_loads(before) is before


def test_without_a_reduction_between_nothing_changes():
    body = NORM.replace('reduce %a {kind="sum", axes=(1,)}', "reshape %c2 {shape=(1,)}")
    body = "%c2: f32[1,1] = constant {value=1.0}\n" + body
    before = parse_kernel(kernel(body))
    assert print_kernel(sink_loads(before)) == print_kernel(before)
