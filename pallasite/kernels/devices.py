"""Shared by operations over several devices: the ring of devices along a mesh axis.

The operations are called inside `jax.shard_map`, on one device's part of each operand.
"""

import dataclasses
from typing import Any, Literal

import jax
from jax import lax

from pallasite import jaxcompat
from pallasite.errors import SpecError
from pallasite.kernels import configs
from pallasite.target import Tpu

# How blocks get from one device to the next:
# "remote": by copies that the kernel itself makes (TPUs only).
# "collective": by XLA collectives between kernels.
# "auto": "remote" on a TPU, else "collective".
Transport = Literal["auto", "remote", "collective"]


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along an axis of the mesh, each with a right neighbour."""

    axis: str
    size: int

    @staticmethod
    def of(operation: str, axis: str) -> "Ring":
        """The ring along an axis of the enclosing `shard_map`."""
        try:
            return Ring(axis, lax.axis_size(axis))
        except (NameError, TypeError):
            mesh = jaxcompat.device_mesh()
            axes = [] if mesh is None else list(mesh.manual_axes)
            raise SpecError(
                f"{operation}: there is no mesh axis {axis!r} here",
                [("axes", ", ".join(map(repr, axes)) or "none")],
                fix="pass axis= with the name of an axis that an enclosing "
                "jax.shard_map maps over",
            ) from None

    @property
    def place(self) -> Any:
        """This device's index along the ring."""
        return lax.axis_index(self.axis)

    def source(self, step: Any) -> Any:
        """The device whose block this one holds after `step` steps to the right."""
        return lax.rem(self.place + self.size - step, self.size)

    def pass_on(self, blocks: Any) -> Any:
        """Passes `blocks` one to the right: returns those of the left neighbour."""
        to_the_right = [(n, (n + 1) % self.size) for n in range(self.size)]
        pass_on = lambda x: lax.ppermute(x, self.axis, to_the_right)
        return jax.tree.map(pass_on, blocks)

    def varying(self, *values: Any) -> list[Any]:
        """Values marked as differing between the devices of the ring.

        Backward rules then return one device's share of their cotangents. The mark's
        transpose sums the shares of a value that devices have in common.
        """
        return jaxcompat.vary_alike([*values, self.place])[:-1]


def by_remote_copies(transport: Transport) -> bool:
    """Whether kernels copy between devices themselves."""
    if transport != "auto":
        return transport == "remote"
    mesh = jaxcompat.device_mesh()
    # Kernels identify a device by its index along every axis.
    knows_its_place = mesh is not None and set(mesh.axis_names) == set(mesh.manual_axes)
    return knows_its_place and configs.traced_for(Tpu)


def check_divides(
    operation: str, name: str, x: Any, dimension: int, parts: int, of: str
) -> None:
    """Checks that a dimension divides into equal parts."""
    if x.shape[dimension] % parts:
        raise SpecError(
            f"{operation}: dimension {dimension} of {name} cannot be divided into "
            f"{parts} equal parts",
            [("has shape", x.shape), ("parts", f"{parts} {of}")],
            fix=f"pad the dimension to a multiple of {parts}",
        )
