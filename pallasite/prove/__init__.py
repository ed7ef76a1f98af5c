"""Proofs about kernels for all inputs of given shapes: `pl.prove`, `pallasite prove`."""
