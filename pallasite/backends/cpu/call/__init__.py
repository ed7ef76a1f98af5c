"""What XLA calls: handler, threads, memory between calls, machine code."""
