from collections.abc import Sequence

FLOAT32: int
BFLOAT16_TILES: int

def kinds() -> list[int]: ...
def products(
    kind: int,
    x: int,
    y: int,
    rows: int,
    outputs: int,
    columns: int,
    threads: int,
    matrices: Sequence[int],
    counts: Sequence[int],
    /,
) -> None: ...
