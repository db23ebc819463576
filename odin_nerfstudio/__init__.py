"""Odin and NeRF-XL for nerfstudio: multi-GPU neural rendering training as a method plugin."""

__version__ = "0.1.0"
