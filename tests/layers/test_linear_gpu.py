"""The linear layer on a GPU: the library that multiplies depends on the number of tokens."""

from __future__ import annotations

import pytest
import torch

from paceline.distributed.tp_group import SingleProcessGroup
from paceline.layers.linear import Linear

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("outputs", [3072, 8200])
@pytest.mark.parametrize("tokens", [47, 48, 128, 129])
def test_any_number_of_tokens_gives_the_product(outputs: int, tokens: int) -> None:
    layer = Linear(
        256, (outputs,), split="in", bias=False, tp=SingleProcessGroup(), dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(0)
    assert layer.weight is not None
    with torch.inference_mode():
        layer.weight.normal_(generator=generator)
        x = torch.randn(tokens, 256, generator=generator, device="cuda").bfloat16()
        wanted = x.double() @ layer.weight.double().T
        found = layer(x).double()
    assert (found - wanted).abs().max() < 2**-8 * wanted.abs().max()
