"""Passes: functions from Kernel to Kernel, or to what is known about one."""
