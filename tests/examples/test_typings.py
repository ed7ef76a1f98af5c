"""What `typings` tells pyright about JAX is so in the JAX that is installed."""

import ast
import inspect
from pathlib import Path

import jax
import pytest

TYPINGS = Path(__file__).parents[2] / "typings"
STUB = ast.parse((TYPINGS / "jax/_src/api.pyi").read_text())
FUNCTIONS = [
    node
    for node in STUB.body
    if isinstance(node, ast.FunctionDef) and node.name != "__getattr__"
]


def names(stub: ast.FunctionDef) -> list[str]:
    given = stub.args
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


@pytest.mark.parametrize("stub", FUNCTIONS, ids=lambda stub: stub.name)
def test_parameters_are_those_of_jax(stub: ast.FunctionDef):
    own = list(inspect.signature(getattr(jax, stub.name)).parameters)
    assert [name for name in names(stub) if name not in own] == []
    if stub.name == "jit" and not stub.args.posonlyargs:
        own.remove("fun")  # the overload that makes a decorator
    assert names(stub) == own


def test_members_of_classes_are_those_of_jax():
    jitted = jax.jit(lambda x: x)
    (stub,) = (n for n in STUB.body if isinstance(n, ast.ClassDef))
    methods = [n.name for n in stub.body if isinstance(n, ast.FunctionDef)]
    assert [name for name in methods if not hasattr(jitted, name)] == []

    tree = ast.parse((TYPINGS / "jaxlib/_jax.pyi").read_text())
    device = next(
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Device"
    )
    fields = [
        n.target.id
        for n in device.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    assert [name for name in fields if not hasattr(jax.devices()[0], name)] == []
