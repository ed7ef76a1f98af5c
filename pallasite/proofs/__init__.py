"""Proofs about kernels, for all inputs: `pl.prove` and `pallasite prove`."""
