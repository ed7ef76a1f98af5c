"""The evaluator over jax.numpy: any kernel as StableHLO."""
