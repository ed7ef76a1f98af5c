"""Spaces of configurations: the values of each parameter, and valid combinations."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from pallasite.errors import SpecError

Config = dict[str, Any]


class Space:
    """Every combination of values that a rule allows.

    Args:
        values: the values of each parameter, ordered so that neighbours are similar.
        allows: whether a configuration is valid; None: all are.
    """

    def __init__(
        self,
        values: Mapping[str, Sequence[Any]],
        allows: Callable[[Config], bool] | None = None,
    ):
        self.values: dict[str, tuple[Any, ...]] = {}
        self._allows = allows
        for name, each in values.items():
            if isinstance(each, str) or not isinstance(each, Iterable):
                raise SpecError(
                    f"the values of the parameter {name!r} are {each!r}",
                    fix=f"pass a sequence of them: {name}=({each!r}, ...)",
                )
            self.values[name] = tuple(each)
            if not self.values[name]:
                raise SpecError(
                    f"the parameter {name!r} has no values",
                    fix="pass at least one, such as its default",
                )

    @cached_property
    def configs(self) -> list[Config]:
        """All configurations, in order."""
        combined = itertools.product(*self.values.values())
        made = [dict(zip(self.values, each, strict=True)) for each in combined]
        return [
            config for config in made if self._allows is None or self._allows(config)
        ]

    @cached_property
    def identity(self) -> str:
        """Equal for spaces with the same configurations."""
        text = json.dumps(self.configs, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def neighbours(self, config: Config) -> Iterator[Config]:
        """Configurations with one parameter moved one value up or down."""
        for name, values in self.values.items():
            if config[name] not in values:
                continue
            place = values.index(config[name])
            for step in (-1, 1):
                if 0 <= place + step < len(values):
                    other = {**config, name: values[place + step]}
                    if other in self.configs:
                        yield other
