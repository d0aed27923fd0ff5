FLOAT32: int
BFLOAT16: int

def norm(
    dtype: int, x: int, added: int, weight: int, sum: int, y: int, rows: int, width: int, weights: int, threads: int, epsilon: float, /
) -> None: ...
def rope_and_store_kv(
    dtype: int,
    qkv: int,
    cosines: int,
    sines: int,
    weights: int,
    keys: int,
    values: int,
    slots: int,
    rows: int,
    heads: int,
    kv_heads: int,
    width: int,
    num_slots: int,
    threads: int,
    int8: bool,
    head_bytes: int,
    epsilon: float,
    /,
) -> None: ...
def int8_rows(dtype: int, x: int, packed: int, rows: int, width: int, row_bytes: int, threads: int, /) -> None: ...
def paged_attention(
    dtype: int,
    q: int,
    q_pitch: int,
    rows: int,
    sequences: int,
    lengths: int,
    tables: int,
    table_pitch: int,
    keys: int,
    values: int,
    out: int,
    count: int,
    heads: int,
    kv_heads: int,
    width: int,
    page_size: int,
    num_pages: int,
    window: int,
    num_rows: int,
    num_sequences: int,
    threads: int,
    int8: bool,
    head_bytes: int,
    /,
) -> None: ...
def topk_softmax(
    dtype: int, logits: int, weights_dtype: int, ids: int, weights: int, rows: int, experts: int, active: int, threads: int, scale: float, /
) -> None: ...
def partition_by_server(
    experts: int,
    weights: int,
    weight_bytes: int,
    pairs: int,
    count: int,
    active: int,
    servers: int,
    replicas: int,
    num_experts: int,
    width: int,
    num_servers: int,
    max_piece: int,
    turn: int,
    out: int,
    weights_out: int,
    counts: int,
    /,
) -> None: ...
def sort_by_expert(
    experts: int,
    places: int,
    num_experts: int,
    held: int,
    rows: int,
    pairs: int,
    num_rows: int,
    row_bytes: int,
    x: int,
    sorted_x: int,
    sorted_place: int,
    counts: int,
    threads: int,
    /,
) -> bool: ...
def weighted_sum(
    dtype: int,
    sorted_y: int,
    sorted_place: int,
    rows: int,
    weights: int,
    sums: int,
    pairs: int,
    width: int,
    num_rows: int,
    threads: int,
    /,
) -> None: ...
def add_parts(dtype: int, residual: int, total: int, rows: int, width: int, threads: int, /, *parts: int) -> None: ...
