"""What an author calls: pallas_call, kernel over a mesh, emit_pipeline."""
