"""The `ucx` transport: UCX endpoints between two processes, through ucxx."""
