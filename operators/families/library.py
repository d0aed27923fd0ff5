"""Models of architectures that flowrt has no family for: their config is read by transformers, and its module computes them.

Free of torch until such a config is read (library_config.py).
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import Family
from flowrt.operators.families.quantization import refuse_quantized_config
from flowrt.operators.model_config import ModelConfig, ModelError

PACKAGES = ("transformers", "greenlet")


def missing_package() -> str:
    """The package that such a model needs and that is not installed; "": none."""
    return next((name for name in PACKAGES if find_spec(name) is None), "")


def read_config(file: ConfigFile) -> ModelConfig:
    """config.json as transformers reads it. Raises ModelError for an architecture that cannot run this way, with the reason."""
    if missing := missing_package():
        why = f"{file.values.get('model_type')!r} is not of flowrt's own families, and {missing} is not installed"
        raise ModelError(f'{file.path}: model_type: {why}: pip install -e ".[transformers]" in the clone of flowrt')
    refuse_quantized_config(file.path, file.values)
    try:
        module = import_module("flowrt.operators.library_config")
    except ImportError as error:
        raise ModelError(f"{file.path}: model_type: this transformers cannot be used ({error}); install 5.20 or newer") from error
    config: ModelConfig = module.read_library_config(file.path, dict(file.values))
    return config


FAMILY = Family(name="transformers", read_config=read_config, parts={})
