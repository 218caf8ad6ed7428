"""Build a model and fill it from its safetensors files, one tensor at a time.

Headers are checked first (``weights``), so that nothing large is touched when something is wrong.
Never opens a pickle and never imports code from a model directory.
"""

from __future__ import annotations

import logging
import time

import torch
from safetensors import safe_open

from paceline.attention.backend import AttentionBackend
from paceline.config import ModelConfig
from paceline.distributed.tp_group import TPGroup
from paceline.models.decoder import DecoderModel
from paceline.models.registry import model_class
from paceline.models.staging import Staging
from paceline.models.weights import check_weights, count_parameters

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    config: ModelConfig, device: str, attention: AttentionBackend, tp: TPGroup
) -> DecoderModel:
    """The model of ``config``, loaded into its dtype on ``device`` and ready to run.

    Raises ConfigError when the files do not hold the model config.json describes.
    """
    model = create_model(config, device, attention, tp)
    fill_model(model, config)
    return model


def create_model(
    config: ModelConfig, device: str, attention: AttentionBackend, tp: TPGroup
) -> DecoderModel:
    """The same with weights that are allocated and hold nothing yet; see ``fill_model``."""
    check_weights(config.path, config.arch)
    with torch.inference_mode():
        make, dtype = model_class(config.arch.family), TORCH_DTYPES[config.dtype]
        return make(config.arch, attention, tp, dtype, device).eval()


def fill_model(model: DecoderModel, config: ModelConfig) -> None:
    """Load the weights of ``config`` into its model. Any thread may do it.

    Raises ConfigError when the files do not hold the model config.json describes.
    """
    start = time.perf_counter()
    with torch.inference_mode():
        load_weights(model, check_weights(config.path, config.arch))
        packed = model.pack_weights()
    parameters = count_parameters(config.arch)
    logger.info(
        "loaded %s: %.1fM parameters, %.2f GB as %s, %.1f s%s",
        config.name,
        parameters / 1e6,
        parameters * config.dtype_bytes / 1e9,
        config.dtype,
        time.perf_counter() - start,
        f"; {packed} matrices packed for this CPU" if packed else "",
    )


def load_weights(model: DecoderModel, files: dict[str, list[str]]) -> None:
    """Copy every tensor of ``files`` ({file: names}, from ``check_weights``) into the model.

    Nothing of a file is kept beside the model: tensors are views of the mapped file, whose pages
    the system may reclaim. Conversion to the model's dtype happens in the copy.
    """
    targets = model.weight_targets()
    device = model.norm.weight.device
    staging = Staging(device) if device.type == "cuda" else None
    for file, names in files.items():
        with safe_open(file, framework="pt", device="cpu") as shard:
            for name in names:
                target, tensor = targets[name], shard.get_tensor(name)
                if staging is None:
                    target.copy_from(tensor)
                else:
                    staging.copy(target.part_of(tensor), target.destination)
