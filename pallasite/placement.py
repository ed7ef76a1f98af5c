"""Which platform and chip a kernel call is for.

The `target` knob comes first, then what JAX lowers for, then the device present.
"""

from typing import Any

import jax

from pallasite import config, jaxcompat
from pallasite.backends import base
from pallasite.target import (
    GPU_PLATFORMS,
    Chip,
    Host,
    chip_of_device,
    host,
    named,
    usual,
)


def own_platform() -> str:
    """The platform of JAX's default backend, as lowering rules name it."""
    name = jax.default_backend()
    return next(filter(is_here, GPU_PLATFORMS), name) if name == "gpu" else name


def is_here(platform: str | None) -> bool:
    """Whether code being compiled will run on a device of this process."""
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def accelerator(*platforms: str) -> Chip | None:
    """The accelerator to compile for on one of these platforms: the `target` knob's,
    else the one present."""
    if config.get("target"):
        found = named(config.get("target"))
        chip = found.chip if found.platform in platforms else None
        return chip if isinstance(chip, Chip) else None
    for platform in platforms:
        try:
            return chip_of_device(jax.devices(platform)[0].device_kind)
        except RuntimeError:  # compiling here to run elsewhere
            continue
    return None


def chip_for(backend: str | None) -> Chip | Host:
    """The chip that a call being traced will most likely run on.

    Args:
        backend: the backend the call names, if any.
    """
    name = backend or config.get("backend")
    if name in base.names():
        platforms = base.get(name).platforms
        found = None if "cpu" in platforms else accelerator(*platforms)
    elif config.get("target"):
        return named(config.get("target")).chip
    else:
        platforms = (own_platform(),)
        found = chip_of_device(jax.devices()[0].device_kind)
    if found is not None or "cpu" in platforms:
        return found or host()
    # Compiling here to run elsewhere, or a chip missing from the table.
    return usual(platforms[0])


def chip_on(platform: str | None, given: Chip | None) -> Chip | Host:
    """What a kernel lowered for a platform runs on, for choices."""
    if platform is None or platform == "cpu":
        return host()
    return given or accelerator(platform) or usual(platform)


def lowered_for(ctx: Any, platform: str | None) -> Chip | None:
    """The accelerator that a lowering is for: a topology's, or that of its devices.

    The `target` knob comes first. None: JAX has not said, or it is no accelerator.
    """
    device = jaxcompat.lowering_device(ctx)
    if config.get("target") or device is None:
        return None
    found = chip_of_device(device.device_kind)
    return found if found is not None and found.platform == platform else None
