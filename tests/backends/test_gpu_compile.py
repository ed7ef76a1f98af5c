"""What `gpu_compile.py` compiles; `make gpu` compiles it."""

from pathlib import Path

import pytest

from tests.backends import gpu_compile
from tests.zoo import all_cases


def test_subjects_are_the_zoo_its_changes_and_random_kernels():
    plain = gpu_compile.subjects(["none"], 0, 1)
    assert plain == [f"zoo {case.name} none" for case in all_cases()]
    more = gpu_compile.subjects(["none", "grad"], 20, 7)
    assert len(plain) + 20 < len(more) < 2 * len(plain) + 20
    assert more[-1].startswith("random ") and more[-1].endswith(" 7000019")


def test_a_missing_compiler_is_named(tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        gpu_compile.main(["--plugin", str(tmp_path)])
    assert "no JAX plugin for CUDA in" in capsys.readouterr().err
