AVX2: int
AVX512: int
INT8: int
FLOAT8: int
FLOAT16: int
BFLOAT16: int
FLOAT32: int

def levels() -> list[int]: ...
def product(
    level: int,
    kind: int,
    x: int,
    codes: int,
    scales: int,
    y: int,
    rows: int,
    outputs: int,
    columns: int,
    group: int,
    threads: int,
    /,
) -> None: ...
