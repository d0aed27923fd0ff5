"""Torch kernels for every device and dtype; the reference of the C kernels."""
