"""Kernel calls across devices: the rule, and the custom call that XLA partitions."""
