"""C kernels for float32 and bfloat16 on the host; optional, because they need a compiler at installation."""
