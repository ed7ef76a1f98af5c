"""`pallasite.torch.wrap`: memory, dtypes, gradients, graphs of torch, errors."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import pallasite as pl
import pallasite.torch
from pallasite import kernels
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import KernelTypeError, PerformanceWarning, UnsupportedError
from pallasite.kernels import masks
from pallasite.torch import programs, tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


def scale_kernel(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] * w_ref[...]


def scale(x, w):
    """x * w by a kernel, for any shape and dtype."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(scale_kernel, out_shape=shape)(x, w)


def normal(*shape: int, device: str = "cpu", grad: bool = False, dtype=None):
    generator = torch.Generator().manual_seed(sum(shape))
    made = torch.randn(*shape, generator=generator, dtype=dtype or torch.float32)
    return made.to(device).requires_grad_(grad)


def close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


# Memory


@each_device
def test_operands_and_results_stay_where_they_are(device: str, monkeypatch):
    taken: list[int] = []
    given: list[int] = []
    to_jax, to_torch = tensors.to_jax, tensors.to_torch

    def watched_to_jax(operands, target):
        arrays = to_jax(operands, target)
        taken.extend(array.unsafe_buffer_pointer() for array in arrays)
        return arrays

    def watched_to_torch(arrays, device):
        given.extend(array.unsafe_buffer_pointer() for array in arrays)
        return to_torch(arrays, device)

    monkeypatch.setattr(tensors, "to_jax", watched_to_jax)
    monkeypatch.setattr(tensors, "to_torch", watched_to_torch)
    x, w = normal(8, 128, device=device), normal(8, 128, device=device)
    y = pallasite.torch.wrap(scale)(x, w)
    close(y, x * w)
    assert taken == [x.data_ptr(), w.data_ptr()]
    assert given == [y.data_ptr()]
    assert y.device == x.device and y.is_contiguous()


VIEWS = {  # which views are copied
    "whole": (lambda x: x, False),
    "rows": (lambda x: x[4:], False),
    "transposed": (lambda x: x.T, True),
    "stride": (lambda x: x[:, ::2], True),
    "broadcast": (lambda x: x[0].expand(5, 64), True),
    "unaligned": (lambda x: x.flatten()[1:], True),
    "empty": (lambda x: x[:0], False),
    "scalar": (lambda x: x[0, 0], False),
}


@each_device
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, device: str):
    make, copied = VIEWS[view]
    x = make(normal(8, 64, device=device))
    (array,) = tensors.to_jax([x], tensors.jax_device(x.device))
    np.testing.assert_array_equal(np.asarray(array), x.cpu().numpy())
    assert (array.unsafe_buffer_pointer() != x.data_ptr()) == copied


def test_results_have_memory_of_their_own():
    table = jnp.arange(4.0)
    op = pallasite.torch.wrap(lambda x: (x, 2 * x, x, table, 1.0))
    x = torch.ones(4)
    results = op(x)
    for result in results:
        result.add_(1)
    assert x.tolist() == [1] * 4
    assert [r.tolist() for r in op(x)] == [[1] * 4, [2] * 4, [1] * 4, [0, 1, 2, 3], 1]
    twice = pallasite.torch.wrap(lambda x: (y := x + 1, y))
    first, second = twice(x)
    first.zero_()
    assert second.tolist() == [2] * 4


# Dtypes


@each_device
@pytest.mark.parametrize(
    "dtype",
    [dtype for dtype in tensors.JAX_DTYPES if dtype not in tensors.NARROWER],
    ids=str,
)
def test_dtypes_come_back(dtype, device: str):
    seen = []
    op = pallasite.torch.wrap(lambda x: seen.append(x.dtype) or x.reshape(2, -1))
    x = torch.arange(8, device=device).to(torch.float32).to(dtype)
    y = op(x)
    assert seen == [tensors.JAX_DTYPES[dtype]]
    assert y.dtype == dtype and y.shape == (2, 4)
    assert torch.equal(y.view(torch.uint8).flatten(), x.view(torch.uint8))


@pytest.mark.parametrize("dtype", tensors.NARROWER, ids=str)
def test_64_bits_need_the_setting(dtype):
    op = pallasite.torch.wrap(lambda params: params["w"] + 1)
    x = torch.ones(3, dtype=dtype)
    with pytest.raises(KernelTypeError) as error:
        op({"w": x})
    assert "params['w']: " in str(error.value)
    assert f"x.to({tensors.NARROWER[dtype]})" in str(error.value)
    assert "jax_enable_x64" in str(error.value)
    with jax.enable_x64(True):
        assert op({"w": x}).dtype == dtype


@each_device
def test_bf16_kernel(device: str):
    x = normal(8, 128, device=device, dtype=torch.bfloat16)
    w = normal(8, 128, device=device, dtype=torch.bfloat16)
    assert torch.equal(pallasite.torch.wrap(scale)(x, w), x * w)


# Gradients


@each_device
def test_backward(device: str):
    op = pallasite.torch.wrap(scale)
    x = normal(8, 128, device=device, grad=True)
    w = normal(8, 128, device=device, grad=True)
    op(x, w).sum().backward()  # the cotangent is a broadcast scalar
    close(x.grad, w.detach())
    close(w.grad, x.detach())


@each_device
def test_vjp_and_vmap(device: str):
    op = pallasite.torch.wrap(scale)
    x, w = normal(4, 8, 16, device=device), normal(8, 16, device=device)
    y, pull = torch.func.vjp(op, x[0], w)
    close(y, x[0] * w)
    close(pull(x[1]), (x[1] * w, x[1] * x[0]))
    close(torch.vmap(op, in_dims=(0, None))(x, w), x * w)
    grad = torch.func.grad(lambda x, w: op(x, w).sum())
    close(torch.vmap(grad, in_dims=(0, None))(x, w), w.expand(4, 8, 16))
    close(
        torch.func.jacrev(op)(x[0, :1, :3], w[:1, :3])[0, 1, 0],
        w[0, 1] * torch.eye(3, device=device)[1],
    )


def test_only_wanted_gradients_are_computed():
    op = pallasite.torch.wrap(scale)
    x, w = normal(8, 128, grad=True), normal(8, 128)
    y = op(x, w)
    saved = y.grad_fn.saved_tensors
    assert [t.data_ptr() for t in saved] == [w.data_ptr()]
    y.sum().backward()
    close(x.grad, w)
    with torch.no_grad():
        assert not op(x, w).requires_grad
    w.mul_(2)
    y = op(x, w)
    w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_integers_have_no_gradient():
    op = pallasite.torch.wrap(lambda x, n: {"rows": x[n], "next": n + 1})
    x, n = normal(5, 3, grad=True), torch.tensor([1, 1, 4], dtype=torch.int32)
    out = op(x, n)
    assert out["next"].tolist() == [2, 2, 5] and not out["next"].requires_grad
    out["rows"].sum().backward()
    assert x.grad.sum(1).tolist() == [0, 6, 0, 0, 3]


def test_results_without_cotangent():
    op = pallasite.torch.wrap(lambda x: (jnp.sin(x), jnp.cos(x)))
    x = normal(3, grad=True)
    op(x)[1].sum().backward()
    close(x.grad, -x.detach().sin())


def test_complex_gradients_are_those_of_torch():
    x = normal(4, dtype=torch.complex64, grad=True)
    w = normal(4, dtype=torch.complex64)
    pallasite.torch.wrap(lambda x, w: jnp.sin(x) * w)(
        x, w.conj()
    ).abs().sum().backward()
    wanted = x.grad.clone()
    x.grad = None
    (x.sin() * w.conj()).abs().sum().backward()
    close(x.grad, wanted)


def test_second_derivatives_are_refused():
    op = pallasite.torch.wrap(jnp.sin)
    x = normal(3, grad=True)
    (first,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"wrap\(jax.grad\(f\)\)"):
        first.sum().backward()


# Arguments


def test_pytrees_and_values():
    traced = []

    def function(tree, *, power, names=("a",)):
        traced.append(power)
        return {name: tree[0][name] ** power for name in names}, tree[1]

    op = pallasite.torch.wrap(function)
    x = normal(4).abs()
    tree = ({"a": x, "b": 2 * x}, None)
    assert traced == []
    made, nothing = op(tree, power=2, names=("b", "a"))
    close(made, {"b": 4 * x * x, "a": x * x})
    assert nothing is None and list(made) == ["a", "b"]
    op(tree, power=2, names=("b", "a"))
    op(({"a": -x, "b": x}, None), power=2, names=("b", "a"))
    assert traced == [2]
    op(tree, power=2.0)
    op(tree, power=2)
    assert traced == [2, 2.0, 2] and type(traced[1]) is float


def test_each_signature_is_compiled_once_and_their_number_has_a_limit():
    shapes = []
    op = pallasite.torch.wrap(
        lambda x: (shapes.append(x.shape) or x) + 1, max_signatures=2
    )
    with pytest.warns(PerformanceWarning, match=r"more than 2 signatures.*\[2\]"):
        for size in (1, 2, 1, 3):  # drops 2
            op(torch.zeros(size))
    for size in (1, 3, 2, 3):
        op(torch.zeros(size))
    assert [n for (n,) in shapes] == [1, 2, 3, 2]


def test_a_dropped_program_still_has_its_backward_pass():
    op = pallasite.torch.wrap(lambda x: jnp.sin(x), max_signatures=1)
    x = normal(3, grad=True)
    y = op(x)
    with pytest.warns(PerformanceWarning):
        op(torch.zeros(4))
    y.sum().backward()
    close(x.grad, x.detach().cos())


MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "array": (lambda: np.ones(3), ("argument  x", "ndarray", "torch.from_numpy")),
    "sparse": (lambda: torch.ones(2, 2).to_sparse(), ("dense", "to_dense")),
    "meta": (lambda: torch.ones(2, device="meta"), ("'meta'", "x.to('cpu')")),
    "number": (lambda: 1.0, ("needs at least one tensor",)),
    "dtype": (
        lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        ("does not support dtype torch.float8_e8m0fnu", "x: "),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str):
    make, said = MISTAKES[mistake]
    with pytest.raises((KernelTypeError, UnsupportedError)) as error:
        pallasite.torch.wrap(lambda x: jnp.sin(x))(make())
    for part in said:
        assert part in str(error.value)


def test_programs_of_other_processes_are_refused():
    with pytest.raises(UnsupportedError, match="scale_elsewhere"):
        torch.ops.pallasite.call([torch.ones(3)], "scale_elsewhere")


def test_devices_must_be_one():
    with pytest.raises(KernelTypeError) as error:
        pallasite.torch.wrap(scale)(torch.ones(3), torch.ones(3, device="meta"))
    assert "w    meta" in str(error.value) and "x    cpu" in str(error.value)


def test_results_need_a_dtype_of_torch():
    with pytest.raises(UnsupportedError, match=r"does not support dtype int4"):
        pallasite.torch.wrap(lambda x: x.astype(jnp.int4))(torch.ones(3))


def test_without_torch():
    code = "import sys; sys.modules['torch'] = None; import pallasite.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'pallasite[torch]'" in done.stderr


# Graphs of torch


@each_device
def test_the_operator_is_sound(device: str):
    x = normal(4, 3, device=device)
    op = pallasite.torch.wrap(scale)
    op(x, x)
    (name,) = [
        n
        for n, p in programs.programs.items()
        if p.label == "scale" and p.avals[0].shape == (4, 3) and p.device.type == device
    ][-1:]
    torch.library.opcheck(
        torch.ops.pallasite.call.default,
        ([x, x], name),
        test_utils=("test_schema", "test_faketensor"),
    )


class Block(torch.nn.Module):
    """Norm, causal attention and a residual, by kernels or by torch's own."""

    def __init__(self, width: int, heads: int, by_kernels: bool):
        super().__init__()
        self.heads, self.by_kernels = heads, by_kernels
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.norm = pallasite.torch.wrap(kernels.rms_norm)
        self.attention = pallasite.torch.wrap(
            lambda q, k, v: kernels.attention(q, k, v, mask=masks.Causal())
        )

    def forward(self, x):
        batch, length, width = x.shape
        if self.by_kernels:
            h = self.norm(x, self.weight)
        else:
            h = torch.nn.functional.rms_norm(x, (width,), self.weight, eps=1e-6)
        q, k, v = self.qkv(h).reshape(batch, length, 3, self.heads, -1).unbind(2)
        if self.by_kernels:
            mixed = self.attention(q, k, v)
        else:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True
            ).transpose(1, 2)
        return x + self.out(mixed.reshape(batch, length, width))


def losses(by_kernels: bool, device: str, compiled: bool, steps: int = 20):
    torch.manual_seed(0)
    model = Block(32, 2, by_kernels).to(device)
    step = (
        torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, wanted = normal(2, 24, 32, device=device), normal(3, 24, 32, device=device)[:2]
    found = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(step(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@each_device
def test_a_module_trains_as_with_operators_of_torch(device: str):
    wanted = losses(False, device, compiled=False)
    assert wanted[-1] < 0.9 * wanted[0]
    np.testing.assert_allclose(losses(True, device, compiled=False), wanted, rtol=2e-3)
    few = losses(True, device, compiled=True, steps=4)
    np.testing.assert_allclose(few, wanted[:4], rtol=2e-3)


@pytest.mark.filterwarnings("ignore::pallasite.errors.PerformanceWarning")
def test_compiled_graphs_follow_shapes():
    shapes = []
    op = pallasite.torch.wrap(
        lambda x, n: (shapes.append(x.shape) or x) * n, max_signatures=1
    )
    compiled = torch.compile(
        lambda x: op({"x": x}["x"], 2)[1:] + 1, fullgraph=True, backend="eager"
    )
    for size in (3, 4, 5, 3, 4, 5):
        x = normal(size)
        close(compiled(x), 2 * x[1:] + 1)
    assert len(set(shapes)) == 3


# Streams


def mixed_streams(op: Callable[[Any], Any]) -> list[float]:
    """One number of each result of calls on two streams, with work before and after.

    The memory of a call's result is dropped before the work that reads it has run.
    """
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    reads = []
    op(torch.zeros(1 << 20, device="cuda"))
    torch.cuda.synchronize()
    for n, stream in enumerate(streams * 3):
        with torch.cuda.stream(stream):
            late = torch.zeros(1 << 20, device="cuda")
            torch.cuda._sleep(20_000_000)  # what JAX must wait for
            late.fill_(n)
            after = op(late)
            torch.cuda._sleep(20_000_000)
            reads.append(after * 2)  # what must wait for JAX, and the next call for it
            del after
    torch.cuda.synchronize()
    return [float(read.unique().sum()) for read in reads]


@pytest.mark.gpu
def test_streams_are_in_order():
    op = pallasite.torch.wrap(lambda x: x + 1)
    assert mixed_streams(op) == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]


@pytest.mark.gpu
def test_graph_capture_is_refused():
    op = pallasite.torch.wrap(lambda x: x + 1)
    x = torch.zeros(8, device="cuda")
    op(x)
    torch.cuda.synchronize()
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x + 1
            op(x)


@pytest.mark.gpu
def test_cpu_tensors_run_on_the_cpu_beside_a_gpu():
    y = pallasite.torch.wrap(scale)(normal(8, 128), normal(8, 128))
    assert y.device.type == "cpu"


def test_upstreams_name_wraps_a_gpu_kernel():
    def double(x, o):
        o[...] = x[...] * 2

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    function = plgpu.as_torch_kernel(plgpu.kernel(double, out_shape=shape))
    x = normal(8, 128)
    torch.testing.assert_close(function(x), x * 2)
