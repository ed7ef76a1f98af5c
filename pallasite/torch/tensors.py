"""Converts tensors to JAX arrays and back, sharing memory and respecting both streams.

On a GPU, torch queues work on its current stream and JAX on its own streams. Both sides
follow the stream protocol of DLPack, so the host never waits:

- Tensors become arrays: the stream that JAX names waits for torch's current stream, and
  JAX does not use the arrays earlier.
- Arrays become tensors: torch's current stream waits for the event of JAX's result.

So what JAX reads stays valid until JAX has read it: torch reuses memory in the order of
its stream, which by then waits for the result. A result's memory returns to JAX when
torch drops the tensor; the next wrapped call that writes to it first waits for torch's
stream, since it takes a tensor from there (`_current_stream`, for other streams).
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, UnsupportedError

JAX_DTYPES: dict[torch.dtype, np.dtype] = {
    dtype: jnp.dtype(name)
    for dtype, name in [
        (torch.bool, "bool"),
        (torch.int8, "int8"),
        (torch.int16, "int16"),
        (torch.int32, "int32"),
        (torch.int64, "int64"),
        (torch.uint8, "uint8"),
        (torch.uint16, "uint16"),
        (torch.uint32, "uint32"),
        (torch.uint64, "uint64"),
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        (torch.float32, "float32"),
        (torch.float64, "float64"),
        (torch.complex64, "complex64"),
        (torch.complex128, "complex128"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.float8_e4m3fnuz, "float8_e4m3fnuz"),
        (torch.float8_e5m2, "float8_e5m2"),
        (torch.float8_e5m2fnuz, "float8_e5m2fnuz"),
    ]
}
TORCH_DTYPES = {dtype: mine for mine, dtype in JAX_DTYPES.items()}
# What each 64-bit dtype becomes in JAX without `jax_enable_x64`.
NARROWER = {
    torch.int64: torch.int32,
    torch.uint64: torch.uint32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}
# XLA uses memory in place only if it starts at a multiple of this.
ALIGNMENT = 64


def aval_of(tensor: torch.Tensor, name: str) -> jax.ShapeDtypeStruct:
    """The tensor's shape and dtype in JAX; dtypes that JAX lacks are rejected.

    Args:
        name: the tensor's name in errors.
    """
    dtype = JAX_DTYPES.get(tensor.dtype)
    facts = [("operand", f"{name}: {tensor.dtype}{list(tensor.shape)}")]
    if dtype is None:
        raise KernelTypeError(
            f"JAX does not support dtype {tensor.dtype}",
            facts,
            fix="convert the tensor: x.to(torch.float32)",
        )
    if tensor.dtype in NARROWER and not jaxcompat.flag("jax_enable_x64"):
        raise KernelTypeError(
            f"{tensor.dtype} needs jax_enable_x64, which is off",
            facts,
            fix=f"convert the tensor: x.to({NARROWER[tensor.dtype]}); or allow 64 bits "
            "before the first call: jax.config.update('jax_enable_x64', True)",
        )
    if tensor.layout != torch.strided:
        raise KernelTypeError(
            "a wrapped function supports only dense tensors",
            [*facts, ("layout", tensor.layout)],
            fix="convert the tensor: x.to_dense()",
        )
    return jax.ShapeDtypeStruct(tuple(map(int, tensor.shape)), dtype)


def dtype_of(aval: Any, name: str) -> torch.dtype:
    """The torch dtype of a result that `name` describes."""
    if aval.dtype not in TORCH_DTYPES:
        raise UnsupportedError(
            f"torch does not support dtype {aval.dtype}",
            [("result", f"{name}: {aval.dtype}{list(aval.shape)}")],
            fix="convert it in the wrapped function: y.astype(jnp.float32)",
        )
    return TORCH_DTYPES[aval.dtype]


@functools.cache
def jax_device(device: torch.device) -> Any:
    """The JAX device in whose memory tensors of `device` are."""
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"JAX cannot share memory with torch's device {str(device)!r}",
            fix="move the tensors to a CPU or an NVIDIA GPU: x.to('cpu')",
        )
    try:
        found = jax.local_devices(backend=device.type)
    except RuntimeError as error:
        raise UnsupportedError(
            f"tensors are on {str(device)!r}, but this JAX has no such device",
            [("JAX has", ", ".join(map(str, jax.devices())))],
            fix="install jax[cuda13] and leave 'cuda' and 'cpu' in JAX_PLATFORMS, or "
            "move the tensors: x.to('cpu')",
        ) from error
    if device.type == "cpu":
        return found[0]
    for each in found:
        if each.local_hardware_id == device.index:
            return each
    raise UnsupportedError(
        f"tensors are on {str(device)!r}, which JAX does not see",
        [("JAX has", ", ".join(map(str, found)))],
        fix="let both see the same GPUs: CUDA_VISIBLE_DEVICES",
    )


def to_jax(operands: Iterable[torch.Tensor], device: Any) -> list[jax.Array]:
    """Tensors as arrays, in the same memory if XLA can use it in place.

    The tensor must be contiguous and start at a multiple of 64 bytes; otherwise torch
    copies it first, as it does if a conjugation or negation is pending.
    """
    plain = [_plain(x) for x in operands]
    stream = jaxcompat.stream_for_imports(device)
    if stream is not None:
        where = plain[0].device
        _stream_at(stream, where).wait_stream(_current_stream(where))
    return [jaxcompat.array_of_dlpack(to_dlpack(x), device, stream) for x in plain]


@functools.cache
def _stream_at(address: int, device: torch.device) -> Any:
    return torch.cuda.ExternalStream(address, device)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as DLPack and XLA require it: dense, aligned, detached."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def to_torch(arrays: Iterable[jax.Array], device: torch.device) -> list[torch.Tensor]:
    """Arrays as tensors in the same memory."""
    stream = None
    if device.type == "cuda":
        # In DLPack, 1 denotes CUDA's default stream.
        stream = torch.cuda.current_stream(device).cuda_stream or 1
    else:
        jax.block_until_ready(arrays)
    return [from_dlpack(jaxcompat.dlpack_of_array(x, stream)) for x in arrays]


def _current_stream(device: torch.device) -> Any:
    """torch's current stream, after making it wait for the previous call's stream.

    JAX gives the memory of a dropped result to its next program, which waits only for
    the current stream; another stream may still be reading that memory.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "CUDA graphs cannot capture a JAX program",
            fix="call the wrapped function outside of torch.cuda.graph, and compile "
            "with a mode other than 'reduce-overhead' and 'max-autotune'",
        )
    current = torch.cuda.current_stream(device)
    last = _last_streams.get(device)
    if last is not None and last != current:
        current.wait_stream(last)
    _last_streams[device] = current
    return current


_last_streams: dict[torch.device, Any] = {}
