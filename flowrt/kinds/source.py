"""`source`: emits the steps of a group, whose batches its engine decides (flowrt/workers/group.py)."""

from __future__ import annotations

from flowrt.graph.kinds import Kind, Port

_SAMPLING = (
    "int64[5,samples] float64[6,samples] int64[unfiltered] int64[filtered] int64[3,penalized] int64[2,biased] float64[biased] "
    "int64[masked] uint8[masked,mask_bytes] int64[logprobs] int64[ranks] int64[2,scored]"
)
_LAYOUT = "int64[rows] int64[rows] int64[starts] int64[sequences] int64[sequences,pages]"
_OUTPUTS = (Port("tokens", "int64[rows]"), Port("layout", _LAYOUT, optional="int64[2,sequences]"), Port("sampling", _SAMPLING))
KINDS = (Kind("source", ("tokens",), _OUTPUTS, options=("num_layers",), emits=True, every_layer=("layout",), schedules=True),)
