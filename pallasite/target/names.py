"""Names of targets: `cpu`, `tpu:v6e`, `gpu:h200`, `gpu:sm_90a`, `gpu:gfx942`.

`named("tpu:v6e")` returns the target: JAX's platform and the chip's row.
"""

from dataclasses import dataclass

from pallasite.errors import SpecError, one_of
from pallasite.target.chip import Chip, Gpu, Tpu
from pallasite.target.cpu import Host, host
from pallasite.target.table import chips


@dataclass(frozen=True)
class Named:
    """One target. `platform` is JAX's name ("cuda", not "gpu")."""

    name: str
    platform: str
    chip: Chip | Host


def named(text: str) -> Named:
    """The target of that name.

    Raises:
        SpecError: there is none.
    """
    if not isinstance(text, str):
        raise SpecError(
            f"a target must be a name, not {text!r}", fix=f"one of {', '.join(known())}"
        )
    kind, _, chip = text.strip().partition(":")
    if kind == "cpu" and not chip:
        return Named("cpu", "cpu", host())
    if kind in ("tpu", "gpu") and chip:
        rows = [r for r in chips().values() if isinstance(r, Tpu) == (kind == "tpu")]
        # The suffix of sm_90a means code for this chip alone, which ours is.
        by_arch = [r for r in rows if isinstance(r, Gpu) and r.arch == chip.rstrip("a")]
        found = [row for row in rows if row.name == chip] or by_arch
        if found:
            return of_chip(found[0])
    if text in chips():
        return of_chip(chips()[text])
    raise SpecError(f"unknown target {text!r}", fix=one_of(text, known()))


def of_chip(chip: Chip) -> Named:
    kind = "tpu" if isinstance(chip, Tpu) else "gpu"
    return Named(f"{kind}:{chip.name}", chip.platform, chip)


def known() -> list[str]:
    """The names of all targets."""
    return ["cpu", *(of_chip(row).name for row in chips().values())]
