"""`rows_uncounted`: a dot of few rows is computed as one of many."""

from pallasite.backends.cpu.dot.choose_scheme import is_small, scheme_for
from pallasite.backends.cpu.dot.rows_uncounted import counted, rows_uncounted
from pallasite.backends.cpu.dot.scheme import MemoryLayout, Sizes
from pallasite.ir.nodes import walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.types import F32

BEFORE = """
kernel @product(%x: ref<f32[2,512] any>, %y: ref<f32[64,512] any>, %o: ref<f32[2,64] any>) outputs 1 {
  %0: f32[2,512] = load %x[:, :]
  %1: f32[64,512] = load %y[:, :]
  %2: f32[2,64] = dot %0, %1 {contract=((1,), (1,)), batch=((), ()), dtype=f32, precision=None}
  store %o[:, :] = %2
}
"""  # noqa: E501
AFTER = BEFORE.replace("precision=None}", "precision=None, cpu.rows_uncounted=True}")


def test_it_notes_dots():
    made = rows_uncounted(parse_kernel(BEFORE))
    assert made.text == parse_kernel(AFTER).text


ROWS = """
kernel @products(%x: ref<f32[9,2,64] any>, %o: ref<f32[9,2,2] any>) outputs 1 {
  pipeline %x, %o {grid=(9,), windows=(in[squeezed 1, 2, 64], out[squeezed 1, 2, 2]), semantics=("parallel",)}
    map (%i0: i32) {
      %0: i32 = constant {value=0}
      yield %i0, %0, %0
    }
    map (%i0_1: i32) {
      %1: i32 = constant {value=0}
      yield %i0_1, %1, %1
    }
    body (%i0_2: i32, %x_1: ref<f32[2,64] block>, %o_1: ref<f32[2,2] block>) {
      %2: f32[2,64] = load %x_1[:, :]
      %3: f32[2,2] = dot %2, %2 {contract=((1,), (1,)), batch=((), ()), dtype=f32, precision=None}
      store %o_1[:, :] = %3
    }
}
"""  # noqa: E501


def test_a_program_of_one_row_has_none_to_count():
    kernel = parse_kernel(ROWS)
    assert rows_uncounted(kernel) is kernel
    several = parse_kernel(
        ROWS.replace("out[squeezed 1, 2, 2]", "out[1, 2, 2]")
        .replace("%o_1: ref<f32[2,2] block>", "%o_1: ref<f32[1,2,2] block>")
        .replace("store %o_1[:, :]", "store %o_1[0, :, :]")
    )
    assert rows_uncounted(several) is not several


def test_the_kind_of_scheme_is_that_of_many_rows():
    (plain,) = (op for op in walk(parse_kernel(BEFORE).body) if op.name == "dot")
    (noted,) = (op for op in walk(parse_kernel(AFTER).body) if op.name == "dot")
    sizes, apart = Sizes(1, 2, 64, 512), MemoryLayout(rows_apart=512)

    def scheme(op, sizes):
        kind = counted(op, sizes)
        return type(scheme_for(F32, F32, F32, sizes, apart, apart, kind=kind))

    many = scheme(plain, sizes._replace(rows=64))
    assert scheme(noted, sizes) is many
    assert scheme(plain, sizes) is not many
    tiny = Sizes(1, 1, 16, 16)
    assert is_small(counted(plain, tiny), True)
    assert not is_small(counted(noted, tiny), True)
