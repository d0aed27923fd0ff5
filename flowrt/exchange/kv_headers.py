"""Headers of the messages of KV transfers (kv_transfer.py)."""

from __future__ import annotations

import msgspec


class PullHeader(msgspec.Struct, frozen=True, array_like=True):
    """Requests the next chunk of offer `number`, whose tokens from `first` on the group lacks."""

    request_id: str
    attempt: int
    number: int
    first: int = 0


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """The response to a pull, which it repeats: tokens `first` .. `first + num_tokens - 1` of a layer; of a recurrent one, bytes of its
    state. `digest`: xxh3_64 of the bytes of
    their KV; `extras_digest`: that of the extra tensors, if there are any. `num_valid`: tokens of the prompt that no roll back since the
    epoch of the chunk before computes again. `num_ready`: chunks that are computed and not sent. `refusal`: why there is no chunk, and no
    row."""

    pull: PullHeader
    layer: int = 0
    first: int = 0
    num_tokens: int = 0
    epoch: int = 0
    num_valid: int = 0
    num_ready: int = 0
    is_last: bool = False
    digest: int = 0
    refusal: str = ""
    extras_digest: int = 0
