"""Kernel calls between devices: the rule, and the custom call that XLA partitions."""
