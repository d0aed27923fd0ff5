"""One MoE layer of user operators: a gate that partitions rows by server, two servers of four experts each, and the sum."""

from __future__ import annotations

import torch
from torch.nn import functional as F

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 64, 48, 8, 2


def weights() -> dict[str, torch.Tensor]:
    """The same random weights in every process."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    return {
        "gate": random(NUM_EXPERTS, HIDDEN),
        "gate_up": random(NUM_EXPERTS, 2 * WIDTH, HIDDEN),
        "down": random(NUM_EXPERTS, HIDDEN, WIDTH),
    }


WEIGHTS = weights()


def route(x: "float32[rows,64]") -> {"experts": "int64[rows,2]", "scores": "float32[rows,2]"}:
    scores, experts = torch.topk(torch.softmax(F.linear(x, WEIGHTS["gate"]), dim=-1), TOP_K)
    return {"experts": experts, "scores": scores / scores.sum(dim=-1, keepdim=True)}


def serve(x: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor, held: range) -> torch.Tensor:
    """The weighted sum of the held experts' outputs for each row; rows that use none of them are zero."""
    y = torch.zeros_like(x)
    for expert in held:
        rows, slots = torch.where(experts == expert)
        gate, up = F.linear(x[rows], WEIGHTS["gate_up"][expert]).chunk(2, dim=-1)
        y.index_add_(0, rows, F.linear(F.silu(gate) * up, WEIGHTS["down"][expert]) * scores[rows, slots, None])
    return y


def serve_low(x: "float32[rows,64]", experts: "int64[rows,2]", scores: "float32[rows,2]") -> "float32[rows,64]":
    return serve(x, experts, scores, range(4))


def serve_high(x: "float32[rows,64]", experts: "int64[rows,2]", scores: "float32[rows,2]") -> "float32[rows,64]":
    return serve(x, experts, scores, range(4, 8))


def add(x: "float32[rows,64]", low: "float32[rows,64]", high: "float32[rows,64]") -> {"y": "float32[rows,64]"}:
    return {"y": x + low + high}


def reference(x: torch.Tensor) -> torch.Tensor:
    """The layer in one function."""
    routed = route(x)
    return x + serve(x, routed["experts"], routed["scores"], range(NUM_EXPERTS))
