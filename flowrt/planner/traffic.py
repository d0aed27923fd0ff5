"""Reads and draws traffic: when requests come, how many tokens they have, and which prompts begin alike. Pure but for reading files.

`parse_traffic` takes "in=2048,out=256,rate=8" (a Poisson process), "in=2048,out=256,concurrency=64" (a closed loop), or the path of a
trace:

* Mooncake: a line of JSON per request, with timestamp (ms), input_length, output_length and hash_ids, one per 512 tokens of the prompt
* BurstGPT: CSV with Timestamp (s), Request tokens, Response tokens
* Azure LLM inference: CSV with TIMESTAMP (date and time), ContextTokens, GeneratedTokens
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from os.path import exists
from pathlib import Path

import numpy as np

from flowrt.errors import UserError, nearest, shown
from flowrt.text_files import TextFileError, read_text_file

BLOCK_TOKENS = 512  # of a prompt that have one hash id (Mooncake, section 4)
DEFAULT_REQUESTS = 1000
KEYS = ("in", "out", "rate", "concurrency", "requests", "spread", "seed")
MAX_TOKENS, MAX_REQUESTS, MAX_TRACE_BYTES = 1 << 24, 1 << 24, 4 << 30


@dataclass(frozen=True, slots=True)
class RequestArrival:
    """One request. `blocks`: ids of the blocks of its prompt; prompts that begin with equal ids begin with equal tokens."""

    at_seconds: float
    num_input: int
    num_output: int
    blocks: tuple[int, ...] = ()


def prompt_of(number: int, arrival: RequestArrival, token_ids: Sequence[int]) -> tuple[int, ...]:
    """A prompt of request `number`, drawn from `token_ids`; blocks with equal ids have equal tokens."""

    def drawn(seed: int, num_tokens: int) -> list[int]:
        chosen = np.random.default_rng(seed).integers(len(token_ids), size=num_tokens)
        return [token_ids[each] for each in chosen]

    tokens: list[int] = []
    for block in arrival.blocks[: arrival.num_input // BLOCK_TOKENS]:
        tokens += drawn(2 * abs(block), BLOCK_TOKENS)
    return (*tokens, *drawn(2 * number + 1, arrival.num_input - len(tokens)))


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival. `concurrency`: in a closed loop so many are there at a time, and the next one comes when one ends; the
    times of arrival then do not count. `drawn_rate`: of a Poisson process, of which the arrivals are a sample."""

    name: str
    arrivals: tuple[RequestArrival, ...]
    concurrency: int | None = None
    drawn_rate: float | None = None

    def check_context(self, max_tokens: int) -> None:
        """Raises UserError for a request that a model with this context cannot take."""
        longest = max(self.arrivals, key=lambda each: each.num_input + each.num_output)
        if longest.num_input + longest.num_output > max_tokens:
            needed = f"{longest.num_input} + {longest.num_output} tokens"
            advice = "give shorter ones with --traffic, as in=64,out=32,rate=8"
            raise UserError(f"a request has {needed}, and the model takes {max_tokens}; {advice}")

    def first(self, num: int) -> Traffic:
        """The first `num` requests."""
        return replace(self, arrivals=self.arrivals[:num])

    def scaled(self, factor: float) -> Traffic:
        """The same requests at `factor` times their rate."""
        arrivals = tuple(replace(each, at_seconds=each.at_seconds / factor) for each in self.arrivals)
        return replace(self, arrivals=arrivals, drawn_rate=self.drawn_rate and self.drawn_rate * factor)

    @property
    def tokens(self) -> tuple[float, float]:
        """The mean numbers of input and output tokens."""
        num = len(self.arrivals)
        return sum(each.num_input for each in self.arrivals) / num, sum(each.num_output for each in self.arrivals) / num

    @property
    def rate(self) -> float:
        """Requests per second; inf for a closed loop and for requests that come at once."""
        if self.drawn_rate is not None:
            return self.drawn_rate
        span = self.arrivals[-1].at_seconds - self.arrivals[0].at_seconds
        return (len(self.arrivals) - 1) / span if span and self.concurrency is None else math.inf


def parse_traffic(text: str, num_requests: int | None = None) -> Traffic:
    """The traffic that `text` names. `num_requests`: the most requests; by default all of a trace, and DEFAULT_REQUESTS of drawn ones.

    Raises UserError for a file that cannot be read, with the line that is wrong, and for keys that are unknown, missing or out of range.
    """
    if "=" in text and not exists(text):
        return _drawn(text, num_requests)
    path = Path(text)
    try:
        lines = read_text_file(path, MAX_TRACE_BYTES).splitlines()
    except TextFileError as error:
        raise UserError(f"--traffic {text}: {error.text}; give a trace, or in=2048,out=256,rate=8") from None
    found = sorted(_trace(path, lines), key=lambda each: each.at_seconds)
    if not found:
        raise UserError(f"--traffic {text}: has no request")
    first = found[0].at_seconds
    arrivals = (replace(each, at_seconds=each.at_seconds - first) for each in found[:num_requests])
    return Traffic(path.name, tuple(arrivals))


def drawn_traffic(
    num_input: int,
    num_output: int,
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    num_requests: int = DEFAULT_REQUESTS,
    spread: float = 0.0,
    seed: int = 0,
) -> Traffic:
    """Requests of a Poisson process of `rate` per second, or of a closed loop. `spread`: both lengths vary evenly by up to this share."""
    chance = np.random.default_rng(seed)
    now, arrivals = 0.0, []

    def vary(tokens: int) -> int:
        return max(1, round(tokens * chance.uniform(1 - spread, 1 + spread))) if spread else tokens

    for _ in range(num_requests):
        now += float(chance.exponential(1 / rate)) if rate is not None else 0.0
        arrivals.append(RequestArrival(now, vary(num_input), vary(num_output)))
    load = f"rate={rate:g}" if rate is not None else f"concurrency={concurrency}"
    return Traffic(f"in={num_input},out={num_output},{load}", tuple(arrivals), concurrency, rate)


def _drawn(text: str, num_requests: int | None) -> Traffic:
    given: dict[str, str] = {}
    for pair in text.split(","):
        key, _, value = (each.strip() for each in pair.partition("="))
        if key not in KEYS:
            raise UserError(f"--traffic {text}: unknown key {shown(key)}; {nearest(key, KEYS)}")
        if key in given:
            raise UserError(f"--traffic {text}: {key} is given twice; leave one out")
        given[key] = value

    def number(key: str, least: float, most: float, default: float | None = None) -> float | None:
        if key not in given:
            return default
        try:
            value = float(given[key])
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise UserError(f"--traffic {text}: {key}={given[key]} is not a number from {least:g} to {most:g}")
        return value

    num_input, num_output = number("in", 1, MAX_TOKENS), number("out", 1, MAX_TOKENS)
    rate, concurrency = number("rate", 1e-6, 1e9), number("concurrency", 1, MAX_REQUESTS)
    if num_input is None or num_output is None or (rate is None) == (concurrency is None):
        raise UserError(
            f"--traffic {text}: give in and out (tokens), and rate (requests per second) or concurrency, as in=2048,out=256,rate=8"
        )
    requests = number("requests", 1, MAX_REQUESTS, num_requests or DEFAULT_REQUESTS)
    assert requests is not None
    return drawn_traffic(
        int(num_input),
        int(num_output),
        rate=rate,
        concurrency=None if concurrency is None else int(concurrency),
        num_requests=int(requests),
        spread=number("spread", 0, 0.99, 0.0) or 0.0,
        seed=int(number("seed", 0, 1 << 53, 0) or 0),
    )


def _trace(path: Path, lines: list[str]) -> Iterator[RequestArrival]:
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        yield from _mooncake(path, lines)
        return
    titles, rows = csv_rows(f"--traffic {path}", lines)
    for (at, num_input, num_output), seconds in _FORMATS.items():
        if {at, num_input, num_output} <= {*titles}:
            for number, row in rows:
                where = f"{path}:{number}"
                yield _arrival(where, seconds(where, row[at] or ""), row[num_input], row[num_output])
            return
    known = "; ".join(",".join(columns) for columns in _FORMATS)
    raise UserError(f"--traffic {path}: line 1 is neither JSON with timestamp, input_length, output_length nor the columns {known}")


def csv_rows(where: str, lines: Sequence[str]) -> tuple[list[str], Iterator[tuple[int, dict[str, str | None]]]]:
    """The titles of a CSV file, which are its first line that is not empty, and its rows with their numbers of lines. Raises UserError."""
    begin = next((number for number, line in enumerate(lines) if line.strip()), 0)
    reader = csv.reader(lines[begin:], skipinitialspace=True)

    def read() -> Iterator[list[str]]:
        try:
            yield from reader
        except csv.Error as error:
            raise UserError(f"{where}:{begin + reader.line_num}: {error}; a field may lack its closing quote") from None

    rows = read()
    titles = [title.strip() for title in next(rows, [])]

    def numbered() -> Iterator[tuple[int, dict[str, str | None]]]:
        for row in rows:
            if row:
                yield begin + reader.line_num, dict(zip(titles, [*row, *[None] * len(titles)], strict=False))

    return titles, numbered()


def _mooncake(path: Path, lines: list[str]) -> Iterator[RequestArrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, Mapping) or not {"timestamp", "input_length", "output_length"} <= entry.keys():
            raise UserError(f"{where}: is not an object with timestamp, input_length and output_length")
        ids = entry.get("hash_ids", [])
        if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
            raise UserError(f"{where}: hash_ids is not a list of whole numbers")
        at = _number(where, "timestamp", entry["timestamp"]) / 1e3
        yield replace(_arrival(where, at, entry["input_length"], entry["output_length"]), blocks=tuple(ids))


def _arrival(where: str, at_seconds: float, num_input: object, num_output: object) -> RequestArrival:
    found = [_number(where, name, value) for name, value in (("input tokens", num_input), ("output tokens", num_output))]
    if max(found) > MAX_TOKENS:
        raise UserError(f"{where}: {max(found):g} tokens are more than {MAX_TOKENS}")
    return RequestArrival(at_seconds, max(1, int(found[0])), max(1, int(found[1])))


def _number(where: str, name: str, value: object) -> float:
    try:
        found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    if not 0 <= found < math.inf:
        raise UserError(f"{where}: {name} is {shown(value)}; a number from 0 up is needed")
    return found


def _seconds(where: str, text: str) -> float:
    return _number(where, "Timestamp", text)


def _date_seconds(where: str, text: str) -> float:
    head, _, fraction = text.strip().partition(".")
    try:
        return datetime.fromisoformat(head).timestamp() + (float(f"0.{fraction[:6]}") if fraction else 0.0)
    except ValueError:
        raise UserError(f"{where}: TIMESTAMP is {shown(text)}; a date and time are needed, as 2023-11-16 18:17:03.98") from None


_FORMATS: dict[tuple[str, str, str], Callable[[str, str], float]] = {  # columns of time, input and output tokens
    ("Timestamp", "Request tokens", "Response tokens"): _seconds,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _date_seconds,
}
