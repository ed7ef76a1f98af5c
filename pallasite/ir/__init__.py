"""Kernel IR: types, nodes, op records, builder, text form, verifier, rewriting."""
