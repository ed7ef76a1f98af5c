"""LLVM IR as text: values, scalars, vectors."""
