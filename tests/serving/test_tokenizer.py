"""The tokenizer of a model: encoding, incremental decoding, and chat templates."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flowrt.errors import TokenizerError
from flowrt.serving.template_files import MAX_FILE_BYTES
from flowrt.serving.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox, 12 + 30 = 42",
    "naïve café",
    "你好，世界",
    "日本語のテキスト",
    "🙂🙃 👩‍👩‍👧 flags 🇺🇳",
    "Здравствуй, мир",
] * 3
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(vocab_size: int = 290) -> tokenizers.Tokenizer:
    """Byte-level BPE whose merges are few, so that most characters beyond ASCII are cut into several tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As SentencePiece models have it: words with a mark for the space before, unknown characters as <0x..> bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij", "▁a", "▁b"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)}, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte-level")
    byte_level().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("byte-fallback")
    byte_fallback().save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def streamed(tokenizer: Tokenizer, token_ids: list[int], prompt_token_ids: Sequence[int] = ()) -> list[str]:
    stream = tokenizer.stream(prompt_token_ids)
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_text_comes_back_whole_and_never_in_parts_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tokens_give_the_text_of_decoding_them_at_once(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """What an untrained model writes: bytes that are no characters, special tokens anywhere."""
    token_ids = data.draw(st.lists(st.integers(0, 289), max_size=80))
    assert "".join(streamed(tokenizer, token_ids)) == tokenizer.decode(
        [each for each in token_ids if each not in tokenizer.special_token_ids]
    )


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abcxyz é你🙂", max_size=40))
def test_text_with_byte_fallback_comes_back_whole(fallback: Tokenizer, text: str) -> None:
    token_ids = fallback.encode(text)
    pieces = streamed(fallback, token_ids)
    assert "".join(pieces) == fallback.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_comes_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a🙂b")
    assert len(token_ids) >= 4, "the emoji is cut"
    pieces = streamed(tokenizer, token_ids)
    assert pieces[0] == "a"
    assert pieces[-1] == "", "nothing is held back once the last character is whole"
    assert [piece for piece in pieces if piece] == ["a", "🙂", "b"]


def test_tokens_across_characters_do_not_hold_the_text_back_for_ever(tmp_path: Path) -> None:
    """Tokens of (last byte of one character, first two of the next) never leave a clean boundary."""
    alphabet = dict(zip("你".encode(), "ä½ł", strict=True))
    first, second, third = alphabet.values()
    vocabulary = {first: 0, second: 1, third: 2, first + second: 3, third + first + second: 4, first + second + third: 5}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.decoder = decoders.ByteLevel()
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    token_ids = [3, *[4] * 200, 2]
    pieces = streamed(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == "你" * 201
    shown = 0
    for at, piece in enumerate(pieces):
        shown += len(piece)
        assert shown >= at - 4


def test_the_work_per_token_does_not_grow_with_the_output(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = tokenizer.stream()
    longest = 0
    decode = stream._decode

    def counted(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    monkeypatch.setattr(stream, "_decode", counted)
    broken = tokenizer.encode("你")[0]
    for token_id in [*tokenizer.encode("日本語 the 🙂 " * 50), *[broken] * 300, *[0] * 300]:
        stream.push(token_id)
    assert 0 < longest <= 70


def test_special_tokens_are_left_out_of_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the<|end|> fox")
    assert token_ids.count(0) == 1
    assert "".join(streamed(tokenizer, token_ids)) == tokenizer.decode(token_ids) == "the fox"
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_a_character_that_is_never_finished_is_marked(tokenizer: Tokenizer) -> None:
    *head, last = streamed(tokenizer, tokenizer.encode("ok 🙂")[:-1])
    assert ("".join(head), last) == ("ok ", "\ufffd")


def test_without_tokenizer_json_there_are_only_token_ids(tmp_path: Path) -> None:
    assert Tokenizer.open(tmp_path) is None
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json, which texts need; .* give token ids"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer.json is not a readable tokenizer"):
        Tokenizer.open(tmp_path)


MESSAGES = [{"role": "system", "content": "short"}, {"role": "user", "content": "2 + 2?"}]


def chat_directory(path: Path, **config: object) -> Path:
    byte_level().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return path


@pytest.mark.parametrize("place", ["config", "file", "named"])
def test_a_chat_is_what_transformers_makes_of_it(tmp_path: Path, place: str) -> None:
    template = "{{ bos_token }}" + CHATML
    config: dict[str, object] = {"bos_token": {"content": "<|end|>", "__type": "AddedToken"}}
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    elif place == "config":
        config["chat_template"] = template
    else:
        config["chat_template"] = [{"name": "tools", "template": "no"}, {"name": "default", "template": template}]
    tokenizer = Tokenizer(chat_directory(tmp_path, **config))
    truth = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(truth, PreTrainedTokenizerFast)
    expected = truth.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(MESSAGES) == expected
    assert expected.startswith("<|end|><|im_start|>system\nshort")
    assert tokenizer.encode_chat(MESSAGES) == truth.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content + strftime_now('%d %B %Y') }}",
        "{% for message in messages %}{% generation %}{% set a = '!' %}{{ message.content + a }}{% endgeneration %}{{ a }}{% endfor %}",
        "{{ messages | tojson(indent=2) }} {{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}",
        "{{ messages }}{% for message in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ message.role }}{% endfor %}",
        "{% set ns = namespace(a=1, self=2) %}{% set ns.a = 3 %}{{ ns.a }}{{ dict(b=1) }}{{ dict.fromkeys('c') }}{{ messages }}",
    ],
)
def test_templates_have_the_names_and_tags_of_transformers(tmp_path: Path, template: str) -> None:
    directory = chat_directory(tmp_path, chat_template=template)
    truth = AutoTokenizer.from_pretrained(directory)
    expected = {truth.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)}
    text = Tokenizer(directory).render_chat(MESSAGES)
    expected.add(truth.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True))  # the day may end in between
    assert text in expected
    assert text


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ strftime_now.__globals__.json }}", "failed: .*unsafe"),
        ("{% generation %}", "failed: .*endgeneration"),
        (None, "has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "failed: .*unsafe"),
        ("{% set a = namespace(_b=1) %}", "a namespace cannot have the name '_b'"),
        ("{% set a = namespace() %}{% set a._b = 1 %}", "a namespace cannot have the name '_b'"),
        ("{{ dict.__init__.__globals__ }}", "failed: .*unsafe"),
        ("{% for %}", "failed"),
        ("{{ messages[9].content }}", "failed"),
    ],
)
def test_a_chat_that_cannot_be_made_is_an_error(tmp_path: Path, template: str | None, error: str) -> None:
    tokenizer = Tokenizer(chat_directory(tmp_path, chat_template=template))
    with pytest.raises(TokenizerError, match=error):
        tokenizer.encode_chat(MESSAGES)


def test_files_that_must_not_be_read_are_refused(tmp_path: Path) -> None:
    pipe, large, chat = tmp_path / "pipe", tmp_path / "large", tmp_path / "chat"
    for directory in (pipe, large, chat):
        directory.mkdir()
    os.mkfifo(pipe / "tokenizer.json")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a regular file"):
        Tokenizer.open(pipe)
    with (large / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # a hole: nothing is written
    with pytest.raises(TokenizerError, match=r"it must be at most 256 MiB"):
        Tokenizer.open(large)
    byte_level().save(str(chat / "tokenizer.json"))
    os.mkfifo(chat / "chat_template.jinja")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is not a regular file"):
        Tokenizer(chat).encode_chat([{"role": "user", "content": "hi"}])
    assert Tokenizer.open(tmp_path / "none") is None


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="half a character"):
        Tokenizer(tmp_path).encode("a\ud800")
