"""The pass runner: order, timing, verification, dumps."""

import pytest

from pallasite import config
from pallasite.errors import VerifyError
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.passes.run import SHARED, Dump, Pass, Step, run
from tests.ir import kernels


def rename(kernel: Kernel) -> Kernel:
    return kernel.with_(name=kernel.name + "_2")


def spoil(kernel: Kernel) -> Kernel:
    return kernel.with_(num_outputs=99)


def test_passes_run_in_order_and_are_timed():
    steps: list[Step] = []
    passes = [Pass("rename", rename), *SHARED, Pass("again", rename)]
    new = run(kernels.vector_add(), passes, steps=steps)
    assert new.name == "vector_add_2_2"
    assert [(s.name, s.changed) for s in steps] == [
        ("rename", True),
        *((shared.name, False) for shared in SHARED),
        ("again", True),
    ]
    assert all(s.seconds > 0 for s in steps)


def test_a_pass_may_depend_on_the_one_before():
    steps: list[Step] = []
    same = Pass("same", lambda kernel: kernel)
    again = Pass("again", rename, if_changed=True)
    run(kernels.vector_add(), [same, again, Pass("rename", rename), again], steps=steps)
    assert [step.name for step in steps] == ["same", "rename", "again"]


def test_verification_follows_the_knob():
    spoiled = [Pass("spoil", spoil)]
    with config.override(verify=False):
        assert run(kernels.vector_add(), spoiled).num_outputs == 99
    with config.override(verify=True), pytest.raises(VerifyError, match="99 outputs"):
        run(kernels.vector_add(), spoiled)


def test_dumps_are_numbered_and_can_be_read_back(tmp_path):
    kernel = kernels.matmul()
    with config.override(dump=str(tmp_path)):
        new = run(kernel)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("matmul-")
    files = sorted(folder.iterdir())
    names = ["import", *(shared.name for shared in SHARED)]
    assert [f.name for f in files] == [f"{n:02}-{m}.txt" for n, m in enumerate(names)]
    assert parse_kernel(files[0].read_text()) == kernel
    text = files[-1].read_text()
    assert text.startswith(f"// {names[-1]}: ")
    assert parse_kernel(text) == new


def test_no_dump_without_a_folder(tmp_path):
    with config.override(dump=""):
        assert Dump.of(kernels.matmul()) is None
    with config.override(dump=str(tmp_path)):
        odd = Dump.of(kernels.matmul().with_(name="<lambda>"))
        assert odd is not None
        assert odd.folder.name.startswith("lambda-")
        assert odd.write("llvm", "; text", "ll").name == "00-llvm.ll"
