"""Compiled kernels on the CPU: how they are compiled, cached and spread over threads."""
