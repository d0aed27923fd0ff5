"""Operators of the model on explicit inputs; README.md lists the files and holds the legend of shape suffixes."""

if not __name__.startswith("flowrt."):
    raise ImportError(f"import flowrt.{__name__}, not {__name__}: a second import name would make a second set of classes")
