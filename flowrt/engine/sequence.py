"""The state that a group keeps for one choice of a request. Plain data; the engine and the scheduler change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

from flowrt.actors.control import KvOffer, Request
from flowrt.actors.outputs import Logprobs
from flowrt.engine.constraint import Constraint
from flowrt.engine.prefix_cache import Prefix
from flowrt.engine.state_memory import HeldMemory
from flowrt.sampling_params import FinishReason

SequenceState = Enum("SequenceState", ["WAITING", "PULLING", "RUNNING", "HELD", "ENDED"])


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of one attempt; in a prefill worker all of them, as the last row of a prompt has the logits of each first token. `tokens`
    is the prompt followed by the output; the first `num_computed_tokens` have their state in `holding`.

    WAITING holds no memory; the others do until they have ended. PULLING waits for the KV of its prompt from a prefill worker; HELD, in a
    prefill worker, has the KV of its prompt for a group. While `in_step` its rows are being computed by `micro-batch`, and neither its
    holding nor its tokens may change. `order` is its place in the queue and never changes: a preempted sequence returns to its place.
    `num_computed_tokens` moves only when a step commits, so rolling a step back leaves it as it is.
    """

    request: Request
    order: int
    choice: int = 0
    eos_token_ids: Collection[int] = ()
    constraint: Constraint | None = None  # what it may continue with; it knows the committed tokens
    siblings: list[Sequence] = field(default_factory=list)  # choices of this attempt that have not ended, itself among them
    choices: tuple[int, ...] = field(init=False)  # those whose next token is drawn from its last row
    open_choices: set[int] = field(init=False)  # those that have not ended
    name: str = field(init=False)  # holder of its memory: the request, the attempt, and the choice behind the first
    tokens: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)  # tokens that end it
    output_counts: dict[int, int] | None = field(init=False)  # with penalties: each token of `tokens` -> occurrences in the output
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    holding: HeldMemory = field(init=False)  # its state in the memory of the group
    micro_batch: int = -1
    in_step: bool = False
    latest_step: int = 0  # in which it took part; a larger number is later
    cancelled: bool = False  # its end was sent; it keeps its memory until its step ends
    num_preemptions: int = 0
    num_redone: int = 0  # times that it was computed again for logits that were not finite, since its latest token
    is_suspect: bool = False  # its latest step failed: it runs alone until it has a token
    is_on_trial: bool = field(init=False)  # its request is a suspect: it runs alone from `num_proven_tokens` on until it has a token
    num_proven_tokens: int = field(init=False)  # that a group has computed without crashing or hanging
    kv: KvOffer | None = field(init=False)  # where the KV of its prompt is, until it has tried to pull it
    is_pulled: bool = False  # that KV is in its memory
    is_degraded: bool = False  # its state comes from a step that was computed without some expert
    prefix: Prefix = field(init=False)  # what the prefix cache knows of its tokens
    num_cached_tokens: int = 0  # whose KV it found in the prefix cache when it was first admitted
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # if it scores its prompt: of the tokens behind the first, as computed

    def __post_init__(self) -> None:
        request = self.request
        self.choices, self.open_choices = (self.choice,), {self.choice}
        if self.prefills:
            self.open_choices = {*range(request.params.n)}.difference(request.ended_choices)
            lacking = [choice for choice in sorted(self.open_choices) if not request.committed(choice)]
            self.choices = tuple(lacking or [min(self.open_choices)])
            self.choice = self.choices[0]
        self.name = f"{request.id}/{request.attempt}" + (f"/{self.choice}" if self.choice else "")
        self.holding = HeldMemory(self.name)
        is_first = request.kv is not None and self.choice == min({*range(request.params.n)} - {*request.ended_choices})
        self.kv = request.kv if is_first else None  # the other choices share its pages
        committed = () if self.prefills else request.committed(self.choice)
        self.tokens = [*request.prompt_token_ids, *committed]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.is_on_trial = request.is_suspect
        self.num_proven_tokens = len(self.tokens) - 1 if committed and not request.replays_alone else 0
        self.prefix = Prefix(request.params.cache_salt)
        self.end_token_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos or request.params.structured_outputs is not None:
            self.end_token_ids |= frozenset(self.eos_token_ids)
        self.output_counts = None
        if request.params.has_penalties:
            self.output_counts = {**dict.fromkeys(request.prompt_token_ids, 0), **Counter(committed)}

    @property
    def prefills(self) -> bool:
        """Whether it ends with its first token, and its KV is for a group."""
        return self.request.stage == "prefill"

    @property
    def scores_prompt(self) -> bool:
        """Whether the logprobs of its prompt are computed with it. They go to the client with the first token of the first choice."""
        if self.request.params.prompt_logprobs is None or self.choice or self.request.committed(0):
            return False
        return not self.num_output_tokens and self.kv is None

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether it uses no KV of others. Without finite logits, that may be the reason."""
        return self.num_redone > 0 or self.scores_prompt

    def add_prompt_logprobs(self, found: Iterable[Logprobs]) -> bool:
        """Returns False if one of them is not finite."""
        num_top = self.request.params.prompt_logprobs
        new = [Logprobs(each.token, each.top[:num_top]) for each in found]
        self.prompt_logprobs += new
        return all(isfinite(each.token) for each in new)

    @property
    def runs_alone(self) -> bool:
        return self.is_suspect or (self.is_on_trial and self.num_computed_tokens >= self.num_proven_tokens)

    @property
    def waits_for_siblings(self) -> bool:
        """Whether it has passed its trial, and another choice of its request, which runs, has not. It may come to the same cause."""
        siblings = self.siblings if self.request.is_suspect and not self.is_on_trial else ()
        return any(each.is_on_trial and each.state is SequenceState.RUNNING for each in siblings)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose KV is not computed: 1 while decoding, more before the prompt is through."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Positions it may ever need: the last output token is never fed back."""
        return self.num_prompt_tokens + (0 if self.prefills else self.request.max_tokens - 1)

    @property
    def decodes(self) -> bool:
        """Whether it needs one row for its next token. A prompt of one token does not decode yet: it must not overtake older
        prompts."""
        return self.num_computed_tokens > 0 and self.num_missing_tokens == 1

    @property
    def forbidden_token_ids(self) -> Collection[int]:
        """Tokens that may not be drawn now; a constraint knows them itself."""
        if self.constraint is not None:
            return ()
        return self.end_token_ids if self.num_output_tokens < self.request.params.min_tokens else ()

    def append(self, token_id: int) -> None:
        self.is_on_trial = self.is_suspect = False
        self.num_redone = 0
        self.tokens.append(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if self.output_counts is not None:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    def end_reason(self, token_id: int | None = None) -> FinishReason | None:
        """The reason why the output ends here, or None. A stop token counts as output. `token_id`: the latest token, if it is of another
        one of its choices."""
        if self.num_output_tokens and (self.tokens[-1] if token_id is None else token_id) in self.end_token_ids:
            return "stop"
        return "length" if self.num_output_tokens >= self.request.max_tokens else None
