"""Two user operators: plain functions of tensors, whose annotations are the specs of their ports."""

from __future__ import annotations


def scale(x: "float32[rows,64]") -> "float32[rows,64]":
    return x * 2


def add(a: "float32[rows,64]", b: "float32[rows,64]") -> {"sum": "float32[rows,64]"}:
    return {"sum": a + b}
