"""The families there are. Standard library only; a model's class is imported when it is built.

To add a family: one file with a ``FAMILY``, one line here, one test against the original.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.models import llama, mistral, qwen2, qwen3
from paceline.models.family import Family

if TYPE_CHECKING:
    from paceline.models.decoder import DecoderModel

FAMILIES: dict[str, Family] = {
    family.name: family for family in (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)
}
ARCHITECTURES: dict[str, Family] = {
    architecture: family for family in FAMILIES.values() for architecture in family.architectures
}


def model_class(family: str) -> type[DecoderModel]:
    """The class that builds models of a family (imports torch)."""
    module, _, name = FAMILIES[family].model_class.partition(":")
    found: type[DecoderModel] = getattr(importlib.import_module(module), name)
    return found
