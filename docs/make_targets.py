"""Writes docs/targets.md from the table of chips.

`python docs/make_targets.py` rewrites the page; a test fails if it is out of date.
"""

from pathlib import Path

from pallasite import target

PAGE = Path(__file__).with_name("targets.md")

HEAD = """# Chips

Generated from `pallasite/target/table.py` (`docs/make_targets.py`), the only place that
holds facts about chips: block sizes, cost estimates and error messages read it.
`PALLASITE_TARGET` names the chip to compile for if JAX does not see one. A TPU's
numbers are for one core, a GPU's for the whole chip. Rates are for matmuls without
sparsity, in tera-operations per second. A GPU is named `gpu:h200`, or by its
instructions: `gpu:gfx942` is the first chip that has them. *Run* says whether our
kernels have run on one; for the other chips they are compiled, and run in simulators.

"""


def size(count: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count:g} B"


def common(row: target.Chip) -> list[str]:
    speed = (row.main.bytes_per_second or 0) / 1e9
    rates = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in row.rates.items())
    ran = "yes" if row.ran else "never"
    main = size(row.main.bytes)
    return [f"`{row.name}`", ran, str(row.cores), main, f"{speed:g}", rates]


def tpu(row: target.Tpu) -> list[str]:
    matrix = f"{row.mxus} of {row.mxu_size} x {row.mxu_size}"
    return [*common(row), size(row.vmem.bytes), matrix]


def gpu(row: target.Gpu) -> list[str]:
    memories = [size(row.shared.bytes), size(row.cache.bytes)]
    matrix = " x ".join(map(str, row.matrix))
    return [*common(row), row.arch, str(row.wave), matrix, *memories]


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---"] * len(heads)
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def page() -> str:
    """The whole page as text."""
    shared = ["chip", "run", "cores", "main memory", "GB/s", "rates"]
    lines = [HEAD + "## TPU", ""]
    lines += table(
        [*shared, "VMEM", "matrix units"], list(map(tpu, target.TPUS.values()))
    )
    lines += ["", "## GPU", ""]
    heads = [*shared, "instructions", "threads of a warp", "largest matmul"]
    heads += ["shared memory per block", "L2"]
    lines += table(heads, list(map(gpu, target.GPUS.values())))
    lines += ["", "## CPU", ""]
    lines.append(
        "Vector width, registers, instructions and caches are read from this computer "
        "(`pallasite/target/cpu.py`)."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
