"""A table of rules by name, registered where each rule is defined.

Import rules, tangent rules and the tile ops of the number systems use it; an emitter
lists its rules in one dict at the end of each file.
"""

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]
ANY = "*"


class RuleTable(dict[str, Rule]):
    """Rules by the name of the op or primitive.

    Attributes:
        known: the parameters of the primitive that an import rule knows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, frozenset[str]] = {}

    def rule(self, *names: str, params: str = "") -> Callable[[Rule], Rule]:
        """Add the decorated function under each of `names`.

        `params`: the parameters that the rule knows, separated by spaces; `ANY` of
        those of primitives that only call something.
        """

        def add(fn: Rule) -> Rule:
            for name in names:
                assert name not in self, name
                self[name] = fn
                self.known[name] = frozenset(params.split())
            return fn

        return add

    def join(self, other: "RuleTable") -> None:
        """Add another table's rules."""
        assert not self.keys() & other.keys(), self.keys() & other.keys()
        self.update(other)
        self.known.update(other.known)
