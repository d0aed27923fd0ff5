"""Reads quantities with a unit, such as `80 GB` or `5 us`, from cards and command lines. Pure."""

from __future__ import annotations

import re

from flowrt.errors import UserError, shown

_EXPONENT = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
MAX_NUMBER = 1e24  # more than any rate or size; larger ones would fill lines of a table
_TIMES = {"h": 3600.0, "min": 60.0}
_BASES = {  # base unit -> what a text may end in, each with its factor, and the example of an error
    "B": ({"B": 1.0, "bit": 0.125}, "80 GB"),
    "B/s": ({"B/s": 1.0, "bit/s": 0.125}, "3430 GB/s"),
    "flop/s": ({"FLOPS": 1.0, "OPS": 1.0}, "989 TFLOPS"),
    "s": ({"s": 1.0}, "5 us"),
    "W": ({"W": 1.0}, "700 W"),
}
_QUANTITY = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-zµ/]*)\s*")


def read_quantity(value: object, unit: str, where: str) -> float:
    """The number of `value` in `unit`, one of "B", "B/s", "flop/s", "s", "W", or "" for a plain number. Decimal prefixes: 1 GB = 1e9 B.

    Raises UserError, naming `where`, for a missing or another unit, and for what is not a finite number from 0 up.
    """
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if found is None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UserError(f"{where}: {shown(value)} is not a quantity; write {_example(unit)}")
    number, text = (float(found[1]), found[2].replace("µ", "u")) if found is not None else (float(value), "")  # type: ignore[arg-type]
    if not 0 <= number <= MAX_NUMBER:
        raise UserError(f"{where}: {shown(value)} is not a number from 0 to {MAX_NUMBER:g}; write {_example(unit)}")
    if not unit:
        if text:
            raise UserError(f"{where}: {shown(value)} has a unit; write a plain number")
        return number
    if unit == "s" and text in _TIMES:
        return number * _TIMES[text]
    for ending, factor in _BASES[unit][0].items():
        if text.endswith(ending) and (exponent := _EXPONENT.get(text[: -len(ending)])) is not None:
            return number * 10.0**exponent * factor if exponent >= 0 else number / 10.0**-exponent * factor
    raise UserError(f"{where}: {shown(value)} has {f'the unit {text!r}' if text else 'no unit'}; write {_example(unit)}")


def _example(unit: str) -> str:
    return f"a number with a unit, such as {_BASES[unit][1]!r}" if unit else "a number from 0 up"
