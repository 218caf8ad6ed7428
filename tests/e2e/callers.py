"""The offline API as the tests of wrong input and of failures call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.engines import assert_idle, random_prompt, token_ids
from paceline import LLM
from paceline.outputs import RequestOutput
from paceline.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPT = random_prompt(40)  # two full blocks and a partial one
MAX_LEN = 200


def open_llm(path: Path, **args: Any) -> LLM:
    settings = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": MAX_LEN, **args}
    return LLM(str(path), **settings)


def generate(llm: LLM, prompts: Any = PROMPT, sampling: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, sampling, use_tqdm=False)


def assert_works(llm: LLM, expected: list[int]) -> None:
    """The engine holds nothing, serves PROMPT as ever, and holds nothing again."""
    assert_idle(llm.engine)
    assert token_ids(generate(llm)) == [expected]
    assert_idle(llm.engine)
