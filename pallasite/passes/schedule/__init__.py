"""Scheduling: blocks, steps and loops of a size that suits the chip."""
