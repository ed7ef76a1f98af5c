"""A table of rules by name, registered where each rule is defined.

Import rules, tangent rules and the tile ops of the number systems use it; an emitter
lists its rules in one dict at the end of each file.
"""

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]


class RuleTable(dict[str, Rule]):
    """Rules by the name of the op or primitive."""

    def rule(self, *names: str) -> Callable[[Rule], Rule]:
        """Add the decorated function under each of `names`."""

        def add(fn: Rule) -> Rule:
            for name in names:
                assert name not in self, name
                self[name] = fn
            return fn

        return add
