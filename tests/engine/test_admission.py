"""What a GPU has no room for is refused before it is queued. The rest is in tests/e2e."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
from tiny_model import write_tiny_model

from paceline import SamplingParams
from paceline.engine.admission import Admission
from paceline.engine.tokenizer import Tokenizer
from paceline.engine_args import EngineArgs
from paceline.errors import RequestError
from paceline.prompts import TextPrompt, TokensPrompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("admission") / "model")


def admission(model: Path, device: Literal["cpu", "cuda"]) -> Admission:
    args = EngineArgs(str(model), skip_tokenizer_init=True, num_gpu_blocks_override=200)
    return Admission(dataclasses.replace(args.resolve(), device=device), None)


# The model has two end-of-text ids of its own; id 400 is none of them.
@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"stop_token_ids": list(range(62))}, None),
        ({"stop_token_ids": list(range(63))}, "65 stop token ids, more than the 64"),
        ({"stop_token_ids": list(range(64)), "ignore_eos": True}, None),
        ({"stop_token_ids": list(range(65)), "ignore_eos": True}, "65 stop token ids"),
    ],
)
def test_room_of_a_row_on_a_gpu(model: Path, sampling: dict[str, object], says: str | None) -> None:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    admission(model, "cpu").make_request("a", [5, 6], params)
    on_gpu = admission(model, "cuda")
    if says is None:
        on_gpu.make_request("a", [5, 6], params)
        return
    with pytest.raises(RequestError, match=says):
        on_gpu.make_request("a", [5, 6], params)


def test_vllms_forms_of_prompts(model: Path) -> None:
    form = Admission(EngineArgs(str(model)).resolve(), Tokenizer.load(str(model)))
    tokens = form.make_request("a", TokensPrompt(prompt_token_ids=[5, 6]), SamplingParams())
    assert list(tokens.prompt_token_ids) == [5, 6]
    text = form.make_request("b", TextPrompt(prompt="def"), SamplingParams())
    plain = form.make_request("c", "def", SamplingParams())
    assert list(text.prompt_token_ids) == list(plain.prompt_token_ids)
