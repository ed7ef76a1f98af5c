"""Passes: functions from Kernel to Kernel, and analyses of a kernel."""
