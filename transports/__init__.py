"""Transports: how a message travels between processes; buffers, never torch."""

if not __name__.startswith("flowrt."):
    raise ImportError(f"import flowrt.{__name__}, not {__name__}: a second import name would make a second set of classes")
