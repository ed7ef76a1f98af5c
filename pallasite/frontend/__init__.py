"""Frontend: specs and refs, tracing, import to Kernel IR, the primitive."""
