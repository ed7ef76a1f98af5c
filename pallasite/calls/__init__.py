"""What authors call: pallas_call, kernels over a mesh, emit_pipeline."""
