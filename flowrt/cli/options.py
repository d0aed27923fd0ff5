"""Options of `flowrt run`, with their help and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from cyclopts import Group, Parameter, Token

from flowrt.errors import UserError
from flowrt.serving.output_formats import AUTO_PARSER

MAX_KEY_CHARACTERS = 1000


def read_number(kind: Any, tokens: Sequence[Token]) -> int | float:
    """Reads numbers as JSON does: the parser itself accepts 1.5 and 0x10 as whole numbers."""
    from flowrt.cli.prompts import option_number

    try:
        return option_number(int if int in (kind, *get_args(kind)) else float, tokens[0].value)
    except ValueError as error:
        raise UserError(f"{tokens[0].keyword} {error}") from None


def check_api_key(key: str | None, option: str = "--api-key") -> None:
    """Raises UserError for a key that no header can carry."""
    if key is None:
        return
    if not key.strip():
        raise UserError(f"{option} is empty; give a key of letters and digits, or leave it out")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{option} must be printable ASCII; give a key of letters and digits")
    if len(key) > MAX_KEY_CHARACTERS:
        raise UserError(f"{option} is longer than {MAX_KEY_CHARACTERS} characters")


_PROMPTS = Group("Prompts", sort_key=1)
_SAMPLING = Group(
    "Sampling",
    help="Apply to every prompt; a line of --prompts may override them. generation_config.json of the model replaces the defaults here.",
    sort_key=2,
)
_CHAT_SAMPLING = Group("Sampling", help="Apply to every answer. The server's defaults replace those here.", sort_key=2)
_OTHER = Group("Graph and output", sort_key=3)
_GENERATION_CONFIG = (
    "Where sampling parameters come from that a request does not give: generation_config.json of the model (auto), none, or a folder with "
    "that file."
)
SET_HELP = "Override a key, as deploy.experts.servers=2; repeatable."
Switch: TypeAlias = Annotated[bool, Parameter(negative=(), show_default=False)]
_Overrides: TypeAlias = Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)]
_LogLevel: TypeAlias = Annotated[
    Literal["debug", "info", "warning", "error"], Parameter(help="Log level of the processes on standard error.")
]
_Int: TypeAlias = Annotated[int | None, Parameter(converter=read_number)]
_Float: TypeAlias = Annotated[float | None, Parameter(converter=read_number)]
_TEMPLATE_KWARGS = "Arguments of the chat template, as a JSON object: '{\"enable_thinking\": false}'."


@Parameter(name="*", group=_CHAT_SAMPLING)
@dataclass(frozen=True, kw_only=True)
class ChatSamplingOptions:
    """Sampling parameters for every prompt or, of a chat, for every answer. None: not given."""

    max_tokens: Annotated[_Int, Parameter(help="Maximum number of new tokens per answer. [default: as many as fit]")] = None
    temperature: Annotated[_Float, Parameter(help="Sampling temperature; 0 is greedy. [default: 0, of flowrt chat 1]")] = None
    top_p: Annotated[_Float, Parameter(help="Sample from the most likely tokens that make up this probability. [default: 1, off]")] = None
    top_k: Annotated[_Int, Parameter(help="Sample from this many of the most likely tokens. [default: 0, off]")] = None
    seed: Annotated[_Int, Parameter(help="Seed of the sampling; the same seed gives the same answer. [default: new per request]")] = None
    min_tokens: Annotated[_Int, Parameter(help="Minimum number of new tokens per answer. [default: 0]")] = None
    presence_penalty: Annotated[_Float, Parameter(help="Subtract this from the logit of each token in the answer. [default: 0]")] = None
    frequency_penalty: Annotated[_Float, Parameter(help="Subtract this once per occurrence in the answer. [default: 0]")] = None
    repetition_penalty: Annotated[
        _Float, Parameter(help="Divide positive and multiply negative logits of tokens in prompt and answer by this. [default: 1, off]")
    ] = None
    stop: Annotated[tuple[str, ...] | None, Parameter(negative=(), help="End an answer before this text; repeatable.")] = None
    ignore_eos: Annotated[Switch, Parameter(help="Do not end answers at the end-of-sequence token.")] = False


@Parameter(name="*", group=_SAMPLING)
@dataclass(frozen=True, kw_only=True)
class SamplingOptions(ChatSamplingOptions):
    """Holds the parameters of `flowrt run` and `flowrt demo`, whose record has several answers and logprobs."""

    n: Annotated[_Int, Parameter(help="Number of answers per prompt; the first is shown, --json has all. [default: 1]")] = None
    logprobs: Annotated[_Int, Parameter(help="Write each token's logprob and those of the N most likely (up to 20) to --json.")] = None
    prompt_logprobs: Annotated[_Int, Parameter(help="Write the same for the prompt's tokens after the first to --json.")] = None


@Parameter(name="*", group=_OTHER)
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The other options of a run. None: not given."""

    prompt: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            show_default=False,
            group=_PROMPTS,
            help="Answer this prompt; repeatable. Write --prompt=TEXT if it begins with a dash.",
        ),
    ] = ()
    prompts: Annotated[
        str | None,
        Parameter(
            group=_PROMPTS,
            allow_leading_hyphen=True,
            help='Read prompts from this file: a .txt file with one prompt per line, or JSON lines ("-": from standard input): '
            '{"prompt": text} or {"prompt_token_ids": [...]}, with any option of Sampling as a key. [default: the prompts of the graph '
            "file]",
        ),
    ] = None
    chat: Annotated[Switch, Parameter(group=_PROMPTS, help="Apply the model's chat template to each text.")] = False
    chat_template_kwargs: Annotated[str | None, Parameter(group=_PROMPTS, help=_TEMPLATE_KWARGS)] = None
    model: Annotated[Path | None, Parameter(help="Use this Hugging Face model directory instead of the graph's.")] = None
    generation_config: Annotated[str, Parameter(help=_GENERATION_CONFIG)] = "auto"
    overrides: Annotated[_Overrides, Parameter(help=SET_HELP)] = ()
    json: Annotated[
        str | None, Parameter(allow_leading_hyphen=True, help='Write answers, times and figures to this file; "-" for standard output.')
    ] = None
    trace: Annotated[
        str | None, Parameter(help="Write what each process computed, sent and received to this file, for ui.perfetto.dev.")
    ] = None
    attach: Annotated[str | None, Parameter(help="Answer with the running graph of this name (flowrt up) instead of starting GRAPH.")] = (
        None
    )
    chaos: Annotated[str | None, Parameter(help='Inject faults, as "kill:experts.1@2s" or "pause:experts.0@1s+2s, kill:monitor@2s".')] = (
        None
    )
    quiet: Annotated[Switch, Parameter(name=("--quiet", "-q"), help="Print answers and errors only.")] = False
    log_level: _LogLevel = "warning"


@Parameter(name="*", group=_OTHER)
@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of `flowrt chat`. None: not given."""

    url: Annotated[
        str | None,
        Parameter(
            help="Talk to the server at this URL, of flowrt or any other. [default: the graph that is up; else http://127.0.0.1:8000]"
        ),
    ] = None
    api_key: Annotated[str | None, Parameter(env_var=("FLOWRT_API_KEY", "OPENAI_API_KEY"), help="Key of the server.")] = None
    model_name: Annotated[str | None, Parameter(help="Name of the model in requests. [default: the server's first]")] = None
    system: Annotated[str | None, Parameter(help="System message at the beginning of the conversation.")] = None
    chat_template_kwargs: Annotated[str | None, Parameter(help=_TEMPLATE_KWARGS)] = None
    overrides: Annotated[_Overrides, Parameter(help="Override a key of the started graph; repeatable.")] = ()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeCommandOptions:
    """Options of `flowrt serve` and `flowrt up`, with the names that vLLM's have."""

    name: Annotated[
        str | None, Parameter(help="Name for flowrt ps, logs, drain and down. [default: up: the name of the file; serve: none]")
    ] = None

    host: Annotated[str, Parameter(help="Address to listen on. One that other machines can reach needs --api-key.")] = "127.0.0.1"
    port: Annotated[int, Parameter(converter=read_number, help="Port to listen on; 0: any free one.")] = 8000
    uds: Annotated[Path | None, Parameter(help="Listen on a unix socket at this path instead, for this user only.")] = None
    api_key: Annotated[
        str | None, Parameter(env_var="FLOWRT_API_KEY", help="Serve only requests with the header Authorization: Bearer KEY.")
    ] = None
    allowed_origins: Annotated[
        str | None,
        Parameter(help='Origins whose pages may call this server from a browser, as ["http://localhost:3000"]; *: any. [default: none]'),
    ] = None
    allowed_methods: Annotated[str, Parameter(help="Methods that these pages may use, as a JSON list; *: any.")] = "*"
    allowed_headers: Annotated[str, Parameter(help="Headers that these pages may send, as a JSON list; *: any.")] = "*"
    allow_credentials: Annotated[Switch, Parameter(help="Let the browser send its own cookies and keys with their requests.")] = False
    served_model_name: Annotated[str | None, Parameter(help="Name of the model in requests. [default: the name of its folder]")] = None
    max_model_len: Annotated[
        _Int, Parameter(help="Maximum number of tokens of a prompt and its output together. [default: what model and graph allow]")
    ] = None
    tool_call_parser: Annotated[
        str, Parameter(help="Form of the model's tool calls, by vLLM's names; auto: that of the chat template; none.")
    ] = AUTO_PARSER
    reasoning_parser: Annotated[
        str, Parameter(help="Form of the model's reasoning, by vLLM's names; auto: that of the chat template; none.")
    ] = AUTO_PARSER
    ssl_certfile: Annotated[Path | None, Parameter(help="Serve HTTPS with this certificate chain.")] = None
    ssl_keyfile: Annotated[Path | None, Parameter(help="Private key of the certificate. [default: in --ssl-certfile]")] = None
    drain_seconds: Annotated[
        float, Parameter(converter=read_number, help="Maximum time for requests in progress to finish after SIGTERM or Ctrl-C.")
    ] = 30.0
    model: Annotated[Path | None, Parameter(help="Use this Hugging Face model directory instead of the graph's.")] = None
    generation_config: Annotated[str, Parameter(help=_GENERATION_CONFIG)] = "auto"
    overrides: Annotated[_Overrides, Parameter(help="Override a key, as serving.front_ends=2; repeatable.")] = ()
    log_level: _LogLevel = "warning"
    resume: Annotated[Switch, Parameter(help="Continue the open requests in the graph's request log, whose launcher has died.")] = False
