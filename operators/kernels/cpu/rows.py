"""Calls the C kernels (_rows.c) and checks shapes, dtypes and devices before it passes addresses to them.

The C kernels are several times faster than torch for the few rows of a decode step. The bits of a row depend on that row alone (in
`paged_attention` on its sequence) and are the same on every machine. `_watched` functions run in strict blocks: they pass through torch's
function overrides, so that a proof sees what they compute. Each function raises ValueError for sizes and dtypes that do not match, and
IndexError for an index out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from flowrt.operators.model_config import int8_columns
from flowrt.operators.replica_choice import MAX_PIECE_PAIRS

if TYPE_CHECKING:
    from flowrt.operators.attention_plan import PagedRows, StepPlan
    from flowrt.operators.kv_pages import KvPages
    from flowrt.operators.replica_table import PartFields, ReplicaTable

try:
    from flowrt.operators.kernels.cpu import _rows
except ImportError:  # without a compiler
    _DTYPES: dict[torch.dtype, int] = {}
else:
    _DTYPES = {torch.float32: _rows.FLOAT32, torch.bfloat16: _rows.BFLOAT16}

available = bool(_DTYPES)
P = ParamSpec("P")
R = TypeVar("R")


def fits(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether the C kernels were built and accept rows of this dtype and device."""
    return dtype in _DTYPES and torch.device(device).type == "cpu"


def _watched(function: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    @wraps(function)
    def call(x: Tensor, /, *others: P.args, **named: P.kwargs) -> R:
        if has_torch_function_unary(x):
            seen: R = handle_torch_function(call, (x,), x, *others, **named)
            return seen
        return function(x, *others, **named)

    return call


@_watched
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See `rms_norm` in kernels/torch/rows.py."""
    x, weight = x.contiguous(), _same(weight, x)
    y = torch.empty_like(x)
    _norm(x, 0, weight, 0, y, epsilon)
    return y


@_watched
def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + added, its norm), each rounded once."""
    if added.shape != x.shape:
        raise ValueError(f"rows {list(added.shape)} cannot be added to {list(x.shape)}")
    x, added, weight = x.contiguous(), _same(added, x), _same(weight, x)
    total, y = torch.empty_like(x), torch.empty_like(x)
    _norm(x, added.data_ptr(), weight, total.data_ptr(), y, epsilon)
    return total, y


def _norm(x: Tensor, added: int, weight: Tensor, total: int, y: Tensor, epsilon: float) -> None:
    width = x.shape[-1]
    if x.shape[-weight.dim() :] != weight.shape:
        raise ValueError(f"a weight {list(weight.shape)} does not go with rows {list(x.shape)}")
    addresses = x.data_ptr(), added, weight.data_ptr(), total, y.data_ptr()
    _rows.norm(_dtype(x), *addresses, x.numel() // width, width, weight.numel() // width, torch.get_num_threads(), epsilon)


def rope_and_store_kv(
    qkv_TC: Tensor, num_heads: int, plan: StepPlan, qk_norm: Tensor | None, epsilon: float, slots_T: Tensor, layer: int, pages: KvPages
) -> None:
    """Normalizes (with `qk_norm`, one weight per head) and rotates queries and keys in place, and stores keys and values in their slots. In
    pages of INT8 it puts keys and values as they are stored in place, too.

    qkv_TC: each row holds `num_heads` queries, then keys and values of the heads of the pages. All slots differ. Raises ValueError if
    sizes or dtypes do not match, and IndexError for a slot that does not exist; in both cases nothing is stored.
    """
    keys, values = _layer_pages(qkv_TC, num_heads, layer, pages)
    num_pages, page_size, num_kv_heads, _ = keys.shape
    width = qkv_TC.shape[1] // (num_heads + 2 * num_kv_heads)
    cosines, sines = _same(plan.cos_T1D, qkv_TC), _same(plan.sin_T1D, qkv_TC)
    (slots_T,) = _indices(slots_T)
    num_rotated = num_heads + num_kv_heads
    if width % 2 or cosines.shape != (qkv_TC.shape[0], 1, width) or sines.shape != cosines.shape or slots_T.shape[0] != qkv_TC.shape[0]:
        raise ValueError(f"rows {list(qkv_TC.shape)}, positions {list(cosines.shape)}, slots {list(slots_T.shape)} do not go together")
    if qk_norm is not None and _same(qk_norm, qkv_TC).shape != (num_rotated, width):
        raise ValueError(f"weights {list(qk_norm.shape)} for {num_rotated} heads of {width}")
    qk_norm = None if qk_norm is None else qk_norm.contiguous()
    positions = cosines.data_ptr(), sines.data_ptr(), 0 if qk_norm is None else qk_norm.data_ptr()
    storing = keys.data_ptr(), values.data_ptr(), slots_T.data_ptr()
    sizes = qkv_TC.shape[0], num_heads, num_kv_heads, width, num_pages * page_size
    addresses = qkv_TC.data_ptr(), *positions, *storing
    _rows.rope_and_store_kv(_dtype(qkv_TC), *addresses, *sizes, torch.get_num_threads(), *_heads_of(keys), epsilon)


@_watched
def int8_rows(x_RH: Tensor) -> Tensor:
    """See `packed_rows` in int8_rows.py."""
    x_RH, width = x_RH.contiguous(), x_RH.shape[-1]
    packed = torch.zeros(*x_RH.shape[:-1], int8_columns(width), dtype=torch.int8)
    sizes = x_RH.numel() // max(1, width), width, packed.shape[-1]
    _rows.int8_rows(_dtype(x_RH), x_RH.data_ptr(), packed.data_ptr(), *sizes, torch.get_num_threads())
    return packed


def paged_attention(
    qkv_TC: Tensor, num_heads: int, paged: PagedRows, window: int | None, layer: int, pages: KvPages, out_TC: Tensor
) -> None:
    """Computes attention of the rows `paged`, all different, over the pages of their sequences, into their rows of out [T, N * D].

    qkv_TC is that of `rope_and_store_kv`, `window` that of `plan_step`. Raises ValueError if sizes or dtypes do not match, and IndexError
    for a page, a row or a sequence that does not exist.
    """
    keys, values = _layer_pages(qkv_TC, num_heads, layer, pages)
    num_pages, page_size, num_kv_heads, _ = keys.shape
    width = qkv_TC.shape[1] // (num_heads + 2 * num_kv_heads)
    if _same(out_TC, qkv_TC) is not out_TC or out_TC.shape != (qkv_TC.shape[0], num_heads * width) or num_heads % num_kv_heads:
        raise ValueError(f"results {list(out_TC.shape)} for {qkv_TC.shape[0]} rows of {num_heads} heads of {width}, {num_kv_heads} of keys")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens: a row sees at least itself")
    rows_P, sequences_P, lengths_S, table_SG = _indices(paged.rows_P, paged.sequences_P, paged.kv_length_S, paged.page_table_SG)
    if rows_P.shape[0] != sequences_P.shape[0] or lengths_S.shape[0] != table_SG.shape[0]:
        shapes = [list(each.shape) for each in (rows_P, sequences_P, lengths_S, table_SG)]
        raise ValueError(f"rows, sequences, lengths and page tables {shapes} do not go together")
    queries = qkv_TC.data_ptr(), qkv_TC.shape[1] * qkv_TC.itemsize, rows_P.data_ptr(), sequences_P.data_ptr()
    contexts = lengths_S.data_ptr(), table_SG.data_ptr(), table_SG.shape[1], keys.data_ptr(), values.data_ptr(), out_TC.data_ptr()
    sizes = rows_P.shape[0], num_heads, num_kv_heads, width, page_size, num_pages, window or 0, qkv_TC.shape[0], lengths_S.shape[0]
    _rows.paged_attention(_dtype(qkv_TC), *queries, *contexts, *sizes, torch.get_num_threads(), *_heads_of(keys))


def _layer_pages(qkv_TC: Tensor, num_heads: int, layer: int, pages: KvPages) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, [G, C, K, columns] each. Raises ValueError for a layout of them, or of the rows, that does not fit."""
    keys, values = pages.blocks(layer)
    is_int8 = keys.dtype is values.dtype is torch.int8 and keys.device == values.device == qkv_TC.device
    is_alike = is_int8 or (_same(keys, qkv_TC) is keys and _same(values, qkv_TC) is values)
    if not is_alike or not (qkv_TC.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("rows, keys and values must lie in one piece each")
    _, page_size, num_kv_heads, columns = keys.shape
    width, rest = divmod(qkv_TC.shape[-1], num_heads + 2 * num_kv_heads)
    if not page_size or qkv_TC.dim() != 2 or rest or columns != (int8_columns(width) if is_int8 else width) or values.shape != keys.shape:
        raise ValueError(f"rows {list(qkv_TC.shape)} of {num_heads} heads do not go with pages {list(keys.shape)}")
    return keys, values


def _heads_of(pages: Tensor) -> tuple[bool, int]:
    """Whether they are of INT8, and the bytes of a head."""
    return pages.dtype is torch.int8, pages.shape[-1] * pages.itemsize


@_watched
def topk_softmax(logits_TE: Tensor, num_active: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(expert_ids_TA, weights_TA in `dtype`): the best experts of each row, best first, and their softmax times `scale`.

    Of equal scores the lower id comes first.
    """
    logits_TE = logits_TE.contiguous()
    num_rows, num_experts = logits_TE.shape
    expert_ids = logits_TE.new_empty((num_rows, num_active), dtype=torch.int64)
    weights = logits_TE.new_empty((num_rows, num_active), dtype=dtype)
    addresses = logits_TE.data_ptr(), _DTYPES[dtype], expert_ids.data_ptr(), weights.data_ptr()
    _rows.topk_softmax(_dtype(logits_TE), *addresses, num_rows, num_experts, num_active, torch.get_num_threads(), scale)
    return expert_ids, weights


def add_parts(residual_TH: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """See `add_parts` in kernels/torch/rows.py."""
    residual_TH = residual_TH.contiguous()
    num_rows, width = residual_TH.shape
    total_TH = torch.empty_like(residual_TH)
    held = []  # keeps copies alive
    numbers: list[int] = []
    for rows_R, y_RH in parts:
        if y_RH.shape != (*rows_R.shape, width) or rows_R.dim() != 1:
            shapes = f"rows {list(rows_R.shape)} and responses {list(y_RH.shape)}"
            raise ValueError(f"{shapes} of a part cannot be added to {list(residual_TH.shape)}")
        rows_R, y_RH = *_indices(rows_R), _same(y_RH, residual_TH)
        held.append((rows_R, y_RH))
        numbers += (rows_R.data_ptr(), y_RH.data_ptr(), rows_R.shape[0])
    _rows.add_parts(_dtype(residual_TH), residual_TH.data_ptr(), total_TH.data_ptr(), num_rows, width, torch.get_num_threads(), *numbers)
    return total_TH


def partition_by_server(
    pair_P: Tensor | None, expert_P: Tensor, weight_P: Tensor, num_active: int, table: ReplicaTable, turn: int
) -> list[PartFields]:
    """See `partition_by_server` in kernels/torch/rows.py. Raises IndexError for a pair whose expert or server does not exist."""
    num_servers = table.num_servers
    expert_P, servers_EB, num_replicas_E = _indices(expert_P, table.servers_EB, table.num_replicas_E)
    weight_P, pair_P = weight_P.contiguous(), None if pair_P is None else _indices(pair_P)[0]
    num_experts, width = servers_EB.shape
    num_pairs, num_shares = expert_P.shape[0], num_servers + 1
    num_named = num_pairs if pair_P is None else pair_P.shape[0]
    if num_active < 1 or weight_P.shape != (num_pairs,) or num_named != num_pairs or num_replicas_E.shape[0] != num_experts:
        raise ValueError(f"{num_pairs} pairs do not go with {weight_P.shape[0]} weights and {num_named} numbers of pairs")
    out, weights, counts = expert_P.new_empty(4 * num_pairs), torch.empty_like(weight_P), expert_P.new_empty(2 * num_shares)
    pairs = expert_P.data_ptr(), weight_P.data_ptr(), weight_P.itemsize, 0 if pair_P is None else pair_P.data_ptr(), num_pairs, num_active
    servers = servers_EB.data_ptr(), num_replicas_E.data_ptr(), num_experts, width, num_servers, MAX_PIECE_PAIRS, turn
    _rows.partition_by_server(*pairs, *servers, out.data_ptr(), weights.data_ptr(), counts.data_ptr())
    sizes: list[int] = counts.tolist()
    found = [(share - 1, sizes[2 * share], sizes[2 * share + 1]) for share in range(num_shares) if sizes[2 * share]]
    lengths = [length for _, pairs_of, rows_of in found for length in (pairs_of, pairs_of, pairs_of, rows_of)]
    pieces = out[: sum(lengths)].split_with_sizes(lengths)
    weight_pieces = weights.split_with_sizes([pairs_of for _, pairs_of, _ in found])
    return [
        (server, pieces[4 * at + 3], pieces[4 * at], pieces[4 * at + 1], weight_pieces[at], pieces[4 * at + 2])
        for at, (server, _, _) in enumerate(found)
    ]


def sort_by_expert(x_RH: Tensor, row_P: Tensor, expert_P: Tensor, place_E: Tensor, num_held: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Sorts pairs by expert: returns their rows [P, H], the index of each pair among them [P], and pairs per held expert [num_held].

    `place_E`: the place of an expert among the held ones plus 1, or 0 if it is not held. Returns None when a pair names an expert that is
    not held. Raises IndexError for a row that does not exist.
    """
    x_RH = x_RH.contiguous()
    row_P, expert_P, place_E = _indices(row_P, expert_P, place_E)
    num_pairs, (num_rows, width) = expert_P.shape[0], x_RH.shape
    if row_P.shape[0] != num_pairs:
        raise ValueError(f"{num_pairs} experts do not go with {row_P.shape[0]} rows")
    sorted_PH, place_P, counts_E = x_RH.new_empty(num_pairs, width), expert_P.new_empty(num_pairs), expert_P.new_empty(num_held)
    experts = expert_P.data_ptr(), place_E.data_ptr(), place_E.shape[0], num_held
    pairs = row_P.data_ptr(), num_pairs, num_rows, width * x_RH.itemsize, x_RH.data_ptr()
    results = sorted_PH.data_ptr(), place_P.data_ptr(), counts_E.data_ptr()
    return (sorted_PH, place_P, counts_E) if _rows.sort_by_expert(*experts, *pairs, *results, torch.get_num_threads()) else None


def weighted_sum(y_PH: Tensor, place_P: Tensor, row_P: Tensor, weight_P: Tensor, num_rows: int) -> Tensor:
    """y_RH: for each row the weighted sum over its pairs, in pair order. Raises IndexError for an index out of range.

    `place_P` is that of `sort_by_expert`.
    """
    y_PH, weight_P = y_PH.contiguous(), _same(weight_P, y_PH)
    place_P, row_P = _indices(place_P, row_P)
    num_pairs, width = y_PH.shape
    if not place_P.shape[0] == row_P.shape[0] == num_pairs or weight_P.shape != (num_pairs,):
        raise ValueError(f"{num_pairs} responses do not go with {row_P.shape[0]} rows and {weight_P.shape[0]} weights")
    y_RH = y_PH.new_empty(num_rows, width)
    pairs = y_PH.data_ptr(), place_P.data_ptr(), row_P.data_ptr(), weight_P.data_ptr()
    _rows.weighted_sum(_dtype(y_PH), *pairs, y_RH.data_ptr(), num_pairs, width, num_rows, torch.get_num_threads())
    return y_RH


def _dtype(x: Tensor) -> int:
    """The number of the dtype in _rows.c. Raises ValueError for a tensor that _rows.c does not accept."""
    number = _DTYPES.get(x.dtype)
    if number is None or not x.is_cpu:
        raise ValueError(f"{x.dtype} on {x.device}: rows are float32 or bfloat16 on the host")
    return number


def _same(x: Tensor, other: Tensor) -> Tensor:
    """x, contiguous. Raises ValueError unless it has the dtype and device of `other`."""
    if x.dtype != other.dtype or x.device != other.device:
        raise ValueError(f"{x.dtype} on {x.device} does not go with {other.dtype} on {other.device}")
    return x.contiguous()


def _indices(*tensors: Tensor) -> list[Tensor]:
    """The tensors, contiguous. Raises ValueError unless all are int64 in host memory."""
    for tensor in tensors:
        if tensor.dtype is not torch.int64 or not tensor.is_cpu:
            raise ValueError(f"indices must be int64 on the host, not {tensor.dtype} on {tensor.device}")
    return [tensor.contiguous() for tensor in tensors]
