"""The `cuda` transport: payloads in device memory between two processes of one host."""
