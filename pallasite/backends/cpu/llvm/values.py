"""LLVM values as text with a type: scalars, vectors, and lanes in arithmetic steps.

A `Lanes` is the vector base, base + step, base + 2 step, ..., not yet materialised:
index arithmetic keeps it in this form, so that an access can see that it is contiguous.
`Pointers` is the same for addresses. `writer.py` materialises either as a vector where
an instruction needs one.
"""

from typing import NamedTuple


class Val(NamedTuple):
    """An LLVM value or constant with its type; prints as an operand with type."""

    type: str
    text: str

    @property
    def constant(self) -> int | None:
        """The number that an integer constant stands for, else None."""
        text = self.text
        if text[:1] == "%":  # called at each step of index arithmetic
            return None
        return int(text) if text.lstrip("-").isdigit() else None

    @property
    def is_literal(self) -> bool:
        """Whether it is a literal, rather than the name of a register or global."""
        return self.text[0] not in "%@"

    @property
    def count(self) -> int:
        """How many lanes; 0 for a scalar."""
        return lane_count(self.type)

    def __str__(self) -> str:
        return f"{self.type} {self.text}"


def integer(value: int, type: str = "i64") -> Val:
    """A scalar constant; for a vector type, that of one lane."""
    return Val(lane_type(type), str(value))


TRUE, FALSE, NULL = Val("i1", "1"), Val("i1", "0"), Val("ptr", "null")


class Lanes(Val):
    """Integers `step` apart from `base` on. Its text is not valid LLVM."""

    base: Val
    step: int

    def __new__(cls, base: Val, count: int, step: int = 1) -> "Lanes":
        text = f"lanes({base.text}, {step})"
        made = super().__new__(cls, vector(base.type, count), text)
        made.base, made.step = base, step
        return made


class Pointers(Val):
    """Addresses `step` elements of type `of` apart from `base` on."""

    base: Val
    step: int
    of: str

    def __new__(cls, base: Val, count: int, step: int, of: str) -> "Pointers":
        text = f"pointers({base.text}, {step}, {of})"
        made = super().__new__(cls, vector("ptr", count), text)
        made.base, made.step, made.of = base, step, of
        return made


# --- types ---


def vector(type: str, count: int) -> str:
    """The type of `count` lanes of a scalar type; for 0, the scalar type itself."""
    return f"<{count} x {type}>" if count else type


def lane_count(type: str) -> int:
    return int(type[1:].split(" ", 1)[0]) if type[0] == "<" else 0


def lane_type(type: str) -> str:
    """The type of one lane; for a scalar type, that type."""
    return type[1:-1].split(" x ", 1)[1] if type[0] == "<" else type


_MANGLED = {
    "float": "f32",
    "double": "f64",
    "half": "f16",
    "bfloat": "bf16",
    "ptr": "p0",
}
_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat": 2, "ptr": 8}


def mangled(type: str) -> str:
    """A type as it appears in the name of an overloaded intrinsic."""
    scalar = lane_type(type)
    count = lane_count(type)
    return f"{f'v{count}' if count else ''}{_MANGLED.get(scalar, scalar)}"


def bytes_of(type: str) -> int:
    return _BYTES.get(type) or max(int(type[1:]) // 8, 1)


def steps(type: str, count: int, step: int) -> Val:
    """The constant vector 0, step, 2 step, ..."""
    items = ", ".join(f"{type} {step * n}" for n in range(count))
    return Val(vector(type, count), f"<{items}>")
