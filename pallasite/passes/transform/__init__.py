"""Kernels made from kernels: mapped, sharded, with checks reported."""
