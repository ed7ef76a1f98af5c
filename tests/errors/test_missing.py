"""A name that is not here can be imported, and every use of it says so."""

import operator
from typing import Any

import pytest

import pallasite as pl
from pallasite import missing
from pallasite import mosaic_gpu as plgpu
from pallasite import tpu as pltpu
from pallasite.errors import UnsupportedError

absent = missing.Missing("pallasite.tpu", "Absent", "do without")


def enter(placeholder: Any) -> None:
    with placeholder:
        pass


def subclass(placeholder: Any) -> None:
    class Derived(placeholder):
        pass

    Derived()


USES = {
    "iterate": iter,
    "unpack": lambda m: [*m],
    "next": next,
    "reverse": reversed,
    "length": len,
    "contains": lambda m: 1 in m,
    "item": lambda m: m[0],
    "set item": lambda m: operator.setitem(m, 0, 1),
    "truth": bool,
    "call": lambda m: m(1),
    "attribute": lambda m: m.member,
    "enter": enter,
    "index": lambda m: range(m),
    "make a subclass's object": subclass,
    "decorate at once": lambda m: m(lambda: None),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_says_what_is_missing(use):
    with pytest.raises(UnsupportedError) as raised:
        USES[use](absent)
    assert str(raised.value) == (
        "pallasite.tpu.Absent is not supported by Pallasite\n  fix  do without"
    )


def test_annotations_and_tests_of_types_are_no_uses():
    assert absent | None is absent and None | absent is absent
    assert not isinstance(3, absent) and not issubclass(int, absent)
    assert {absent: 1}[absent] == 1 and absent == absent
    assert repr(absent) == "<missing pallasite.tpu.Absent>"


def test_a_decorator_fails_when_the_function_is_used():
    @plgpu.inline_mgpu(arg_types=(1,), return_type=None)
    def barrier(ctx):
        """Waits."""

    assert (barrier.__name__, barrier.__doc__) == ("barrier", "Waits.")
    with pytest.raises(UnsupportedError) as raised:
        barrier(1)
    text = str(raised.value)
    assert "pallasite.mosaic_gpu.inline_mgpu is not supported" in text
    assert "  function  barrier\n" in text and "test_missing.py" in text


def test_a_decorator_decorates_functions_only():
    with pytest.raises(UnsupportedError, match="inline_mgpu is not supported"):
        plgpu.inline_mgpu()(3)


def test_a_name_of_another_namespace_says_whose_it_is():
    with pytest.raises(AttributeError, match=r"'VMEM': it is pallasite.tpu.VMEM"):
        pl.VMEM
    with pytest.raises(AttributeError, match=r"'BlockSpec': it is pallasite.BlockSpec"):
        pltpu.BlockSpec
    with pytest.raises(AttributeError, match=r"no attribute 'nowhere'$"):
        pl.nowhere
    assert not hasattr(pl, "__wrapped__")
