"""Whether a rule knows all that an equation says: its parameters and their values.

A new JAX may give a primitive a parameter that changes its meaning. A rule that ignored
it would compute something else without a word, so each rule declares the parameters it
knows (`RuleTable.rule`), and others are refused.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

# Parameters that change no result, of any primitive: where it lies, what is promised of
# the operands, how it is compiled.
_NEUTRAL = "sharding out_sharding weak_type indices_are_sorted unique_indices unroll "
_NEUTRAL += "recall_target"
NEUTRAL = frozenset(_NEUTRAL.split())


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda given: any(given is v or given == v for v in values)


def _is_at_best(accuracy: Any) -> bool:
    """A mode, of which there is one here; a tolerance in numbers is not compared."""
    return accuracy is None or getattr(accuracy, "name", "") in ("DEFAULT", "HIGHEST")


# Parameters that every rule that meets them takes with some values only.
ONLY: Mapping[str, Callable[[Any], bool]] = {
    "accuracy": _is_at_best,
    "out_dtype": _is(None),  # of mul
    "group_offset": _is(None),  # of ragged_dot_general
    "reduction_input_size_override": _is(-1),  # of approx_top_k
    "update_consts": _is(()),  # of scatters
    "conjugate_a": _is(False, True),  # of triangular_solve, whose numbers are real
}


def unknown_parameter(params: Mapping[str, Any], known: Collection[str]) -> str | None:
    """Why a rule that knows some parameters cannot be applied to these, if so."""
    for name, value in params.items():
        if name in ONLY:
            if not ONLY[name](value):
                return (
                    f"its parameter {name} is {_shown(value)}, which is not supported"
                )
        elif name not in known and name not in NEUTRAL:
            return f"its parameter {name} ({_shown(value)}) is not known here"
    return None


def _shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
