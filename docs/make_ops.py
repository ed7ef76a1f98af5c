"""Writes docs/ops.md from the op table and the backends' lists.

`python docs/make_ops.py` rewrites the page; a test fails if it is out of date.
"""

from pathlib import Path

from pallasite.backends import base
from pallasite.ir.opdef import EXPLICIT, TILE, OpDef, table
from pallasite.ir.types import ALL, BITS, FLOATS, INTS, NUMBERS, SIGNED

PAGE = Path(__file__).with_name("ops.md")
GROUPS = {ALL: "all", NUMBERS: "numbers", FLOATS: "floats", INTS: "ints"}
GROUPS |= {BITS: "ints, bool", SIGNED: "signed"}

HEAD = """# Ops

Generated from the op table (`docs/make_ops.py`). Every op but `inline_asm` runs in
checked mode, and in the emulation all but that, `roles`, `barrier` and `named_barrier`.
For the native backends: **native** means that the backend emits it, *decomposed* that
it is rewritten into ops that the backend has (`gather`, `scatter` and `sort` in their
simpler forms only; `triton` has all forms of the first two), and a blank that it is not
supported: the error names the op. GPUs accept `debug_check` and check nothing, unless
the call is under `checkify`. `ulp` is the error that a backend may make, in units in
the last place; 0 is exact.

"""


# Ops whose regions say what they mean: a pass puts those in their places.
WRITTEN_OUT = ("matrix_unit",)


def support(row: OpDef, backend: base.Backend) -> str:
    if row.name in backend.native:
        return "**native**"
    by_others = row.lower is not None or row.name in WRITTEN_OUT
    return "*decomposed*" if by_others else ""


def page() -> str:
    """The whole page as text."""
    rows = table()
    backends = [base.get(name) for name in base.names()]
    names = [b.name for b in backends]
    lines = [HEAD, "## Elementwise", ""]
    lines.append("| op | dtypes | ulp | " + " | ".join(names) + " |")
    lines.append("| --- | --- | --- |" + " --- |" * len(names))
    for row in rows.values():
        if row.elementwise:
            kinds = GROUPS.get(row.dtypes, "some")
            cells = [support(row, b) for b in backends]
            head = f"| `{row.name}` | {kinds} | {row.max_ulp:g} | "
            lines.append(head + " | ".join(cells) + " |")
    for title, level in (("Structured", TILE), ("Explicit level", EXPLICIT)):
        lines += ["", f"## {title}", ""]
        lines.append("| op | attributes | what it does | " + " | ".join(names) + " |")
        lines.append("| --- | --- | --- |" + " --- |" * len(names))
        for row in rows.values():
            if not row.elementwise and row.level == level:
                cells = [support(row, b) for b in backends]
                attrs = ", ".join(row.attrs)
                head = f"| `{row.name}` | {attrs} | {row.doc} | "
                lines.append(head + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
