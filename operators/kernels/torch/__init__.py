"""Kernels in torch for every device and dtype: the reference of those in C."""
