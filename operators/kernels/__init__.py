"""Kernels for everything between the matrix products: `cpu` in C, `torch` for every device, with the same signatures."""
