"""Every public array function of JAX in a kernel, against XLA outside a kernel."""
