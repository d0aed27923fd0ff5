"""Operators on whole numbers that fail for some values, at most one for each; calls.yaml connects them."""

import torch


def check(x: torch.Tensor) -> torch.Tensor:
    if x.item() % 4 == 3:
        raise ValueError("three of four pass")
    return x + 1


def halve(x: torch.Tensor) -> object:
    return [x, x] if x.item() == 13 else x * 3


def turn(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(2).to_sparse() if x.item() == 11 else x * 2 + 1


def serve(x: torch.Tensor) -> torch.Tensor:
    if x.item() == 42:
        raise KeyError("served no more")
    return x + 100


def order(x: torch.Tensor) -> torch.Tensor:
    if x.item() == 109:
        raise RuntimeError("out of order")
    return x + 1000


def join(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if right.item() % 7 == 2:
        raise ArithmeticError("no join")
    return left * 10 + right


def note(x: torch.Tensor) -> None:
    return None
