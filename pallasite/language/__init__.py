"""What an author writes in and around a kernel: refs, specs, memory spaces."""
