"""Files that users name: what is not a text of bounded size is refused at once, whatever reads it."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from flowrt.bench.load.load_options import LoadOptions
from flowrt.bench.load.prompts import make_prompts
from flowrt.costs.devices import read_cluster, read_device
from flowrt.costs.models import read_model_card
from flowrt.document import read_document
from flowrt.errors import FlowrtError
from flowrt.planner.fleet import read_daily
from flowrt.planner.inputs import read_hardware
from flowrt.planner.traffic import parse_traffic
from flowrt.serving.template_files import read_text
from flowrt.text_files import TextFileError, read_text_file


def prompts(name: str, path: Path) -> object:
    return make_prompts(LoadOptions(dataset_name=name, dataset_path=path, sharegpt_output_len=1))  # type: ignore[arg-type]


READERS = {
    "device": read_device,
    "cluster": read_cluster,
    "model": read_model_card,
    "hardware": lambda path: read_hardware(str(path)),
    "graph": read_document,
    "traffic": lambda path: parse_traffic(str(path)),
    "day": read_daily,
    "template": read_text,
    "custom": partial(prompts, "custom"),
    "sharegpt": partial(prompts, "sharegpt"),
    "mooncake": partial(prompts, "mooncake"),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "bytes", "missing"])
def test_what_is_no_text_file_is_one_line(read: Callable[[Path], object], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FlowrtError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_beyond_its_bound_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate((2 << 20) + 1)  # a hole: nothing is written
    with pytest.raises(TextFileError, match="is larger than 2 MiB; give a smaller file"):
        read_text_file(path, 2 << 20)


def test_the_line_of_bytes_that_are_no_text_is_known(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo \xff\n")
    with pytest.raises(TextFileError) as caught:
        read_text_file(path)
    assert caught.value.line == 2
    path.write_bytes(b"\xef\xbb\xbfone\n")
    assert read_text_file(path) == "one\n"
