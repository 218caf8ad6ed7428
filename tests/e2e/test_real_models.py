"""Real small models answer coding questions correctly, with and without speculation.

Needs $LLM_TEST_MODELS with qwen2.5-coder-1.5b-instruct and qwen2.5-coder-0.5b-instruct in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams

TARGET, DRAFTER = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"
RULES = " Reply with one Python code block that holds only the function, no examples."
QUESTIONS: list[tuple[str, str, Callable[[Any], bool]]] = [
    (
        "Write `fibonacci(n)`, the n-th Fibonacci number, with fibonacci(0) == 0." + RULES,
        "fibonacci",
        lambda f: [f(i) for i in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13],
    ),
    (
        "Write `is_palindrome(s)`, True if the string s reads the same backwards." + RULES,
        "is_palindrome",
        lambda f: bool(f("abcba")) and not f("abca"),
    ),
    (
        "Write `gcd(a, b)`, the greatest common divisor of two positive integers." + RULES,
        "gcd",
        lambda f: f(48, 18) == 6 and f(7, 13) == 1,
    ),
]


def model_path(name: str) -> str:
    folder = os.environ.get("LLM_TEST_MODELS")
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"set LLM_TEST_MODELS to a directory that holds {name}")
    return str(Path(folder) / name)


def run_answer(text: str, name: str) -> Any:
    """The function an answer defines."""
    match = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    assert match, f"no code block in {text!r}"
    scope: dict[str, Any] = {}
    exec(match.group(1), scope)
    return scope[name]


@pytest.mark.model
@pytest.mark.parametrize(
    "speculation",
    [
        {},
        {"speculative_model": DRAFTER, "num_speculative_tokens": 4},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 4},
    ],
    ids=["off", "draft model", "ngram"],
)
def test_coding_questions_are_answered_correctly(speculation: dict[str, Any]) -> None:
    options = dict(speculation)
    if options.get("speculative_model") == DRAFTER:
        options["speculative_model"] = model_path(DRAFTER)
    with LLM(model_path(TARGET), max_num_seqs=8, max_model_len=2048, **options) as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": question}] for question, _, _ in QUESTIONS],
            SamplingParams(temperature=0, max_tokens=160),
            use_tqdm=False,
        )
        stats = llm.engine.stats
    for output, (_, name, is_right) in zip(outputs, QUESTIONS, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        assert is_right(run_answer(output.outputs[0].text, name))
    if options.get("speculative_model", "").endswith(DRAFTER):
        assert stats.acceptance_rate is not None
        assert stats.acceptance_rate > 0.5
