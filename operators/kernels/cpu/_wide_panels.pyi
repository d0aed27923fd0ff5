from collections.abc import Sequence

AVX2: int
AVX512: int
VNNI: int
INT8: int
FLOAT8: int
FLOAT16: int
BFLOAT16: int
FLOAT32: int
BOTH_INT8: int

def levels() -> list[int]: ...
def products(
    level: int,
    kind: int,
    x: int,
    y: int,
    rows: int,
    outputs: int,
    columns: int,
    group: int,
    threads: int,
    matrices: Sequence[int],
    counts: Sequence[int],
    /,
) -> None: ...
