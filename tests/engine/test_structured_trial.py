"""What is tried out before a structure is used, and what bounds compiling it."""

from __future__ import annotations

import json
import random
import threading
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.test_structured_grammar import asking, compiler, masks, vocabulary, wait
from engine.text_models import tokenizer
from paceline.engine import structured as module
from paceline.engine.regex_check import has_long_repeat, with_safe_repeats
from paceline.engine.structured import StructuredOutputs
from paceline.engine.structured_trial import Budget, try_out
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import RequestError
from paceline.sampling_params import SamplingParams, StructuredOutputsParams

pytest.importorskip("xgrammar")

LONG = [
    {"regex": r"[\w\s]{3,400}"},
    {"regex": r"\s{200}[a-z]{300,}"},
    {"regex": r"(x[\S ]){129,500}"},
    {"json": {"type": "string", "minLength": 60, "maxLength": 400}},
    {"json": {"type": "string", "minLength": 300}},
    {"json": {"properties": {"a": {"type": "string", "pattern": r"[\w ]{1,300}"}}}},
]


@pytest.fixture(scope="module")
def demo() -> tuple[StructuredOutputs, int, int]:
    """A real vocabulary, whose tokens mix what classes hold with what they do not; size, end."""
    tok = Tokenizer.load(Path(str(resources.files("paceline.assets") / "demo")))
    end = min(tok.special_token_ids)
    return StructuredOutputs(tok, tok.vocab_size, [end]), tok.vocab_size, end


@pytest.mark.parametrize("structure", LONG)
def test_masks_of_long_repetitions_allow_what_the_matcher_takes(
    demo: tuple[StructuredOutputs, int, int], structure: dict[str, Any]
) -> None:
    compiled, size, end = demo
    rng = random.Random(3)
    grammar = compiled.sequence_grammars(asking(**structure))[0]
    for _ in range(8):
        _, (allowed,) = masks(grammar, [], size)
        allowed = {i for i in allowed if i < size} - {end}
        assert all(map(grammar.takes, allowed))
        if not allowed:
            break
        grammar.accept(np.array([rng.choice(sorted(allowed))], np.int32))
    assert grammar.fault is None


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("[a-z]{3,100}x[b]", None),
        (r"[\w\s]{3,400}", r"([\w\s]{1,1}){3,400}"),
        (r"\s{129}x[ab]*[c\]d]\d+.", r"(\s{1,1}){129}x[ab]*[c\]d]{1,1}\d+.{1,1}"),
        (r"\u{1F600}a{1,}", None),
        (r"a\{300}[b]", r"a\{300}[b]{1,1}"),  # no repetition, and no harm
    ],
)
def test_classes_are_rewritten_where_a_repetition_is_long(
    pattern: str, written: str | None
) -> None:
    assert with_safe_repeats(pattern) == (pattern if written is None else written)
    assert has_long_repeat(pattern) == (written is not None)


class Wrong:
    """A grammar whose masks allow the ids 1 and 2, while its matcher takes only 1."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.fault: str | None = None

    def accept(self, token_ids: Any) -> None:
        assert token_ids.tolist() == [1]

    def fill(self, drafts: Any, words: Any) -> int:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        words[0, 0] = 0b110
        return 0

    def takes(self, token_id: int) -> bool:
        return token_id == 1


def test_a_fault_of_the_trial_is_one_of_the_structure() -> None:
    grammar = Wrong()
    grammar.fault = "it took too long"
    with pytest.raises(RequestError, match="it took too long"):
        try_out(grammar, "the thing", 40, [0], compare=False)


def test_wrong_masks_are_found() -> None:
    with pytest.raises(RequestError, match="masks are wrong"):
        try_out(Wrong(), "the thing", 40, [0], compare=True)


def test_slow_masks_are_found() -> None:
    with pytest.raises(RequestError, match=r"which token may come next took 0\.[3-9]"):
        try_out(Wrong(0.3), "the thing", 40, [0], compare=False)


def test_an_expression_that_can_be_read_in_many_ways_is_refused() -> None:
    start = time.monotonic()
    with pytest.raises(RequestError, match="which token may come next"):
        wait(compiler(), asking(regex="((.?){100}.?){100}x"))
    assert time.monotonic() - start < 25


def test_a_sequence_whose_mask_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tok = tokenizer("byte-level")
    grammar = compiler().sequence_grammars(asking(regex="[a-z]*"))[0]
    assert masks(grammar, [], vocabulary(tok))[0] == 0
    monkeypatch.setattr(module, "MASK_SECONDS", -1.0)
    assert masks(grammar, [], vocabulary(tok))[0] == -1
    assert grammar.fault is not None
    assert "the structure cannot be used" in grammar.fault


def test_a_structure_that_gets_slower_with_every_token_ends() -> None:
    """Each mask is fast; it is taking the token that grows, about with the cube of the length."""
    tok = tokenizer("byte-level")
    structure = 'root ::= root root root | root root | "a" | ""'
    grammar = compiler().sequence_grammars(asking(grammar=structure))[0]
    token = np.array([tok.encode("a")[-1]], np.int32)
    start = time.thread_time()
    for _ in range(300):
        grammar.accept(token)
        if masks(grammar, [], vocabulary(tok))[0] < 0:
            break
    assert grammar.fault is not None
    assert "the structure" in grammar.fault
    assert time.thread_time() - start < 10


def test_outputs_of_a_request_share_their_time() -> None:
    tok = tokenizer("byte-level")
    first, second = compiler().sequence_grammars(SamplingParams(
        n=2, structured_outputs=StructuredOutputsParams(regex="[a-z]*")
    ))  # fmt: skip
    other = compiler().sequence_grammars(asking(regex="[a-z]*"))[0]
    first._charge(1.01, 100)
    for grammar in (first, second):
        assert masks(grammar, [], vocabulary(tok))[0] == -1
        assert "took 1 s for 0 tokens, and 1 s are allowed" in str(grammar.fault)
    assert masks(other, [], vocabulary(tok))[0] == 0


def test_many_outputs_may_take_more_a_token() -> None:
    few, many = Budget(1), Budget(100)
    for budget in (few, many):
        budget.charge(1.0, 0)
        assert budget.fault is None
        budget.charge(5.0, 100)
    assert "took 6 s for 100 tokens, and 3 s are allowed" in str(few.fault)
    assert many.fault is None


def test_late_compilations_leave_room_for_others_up_to_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    compile_now = StructuredOutputs._compile

    def slow(self: StructuredOutputs, key: Any) -> Any:
        if key[1].startswith("slow"):
            go_on.wait(30)
        return compile_now(self, key)

    outputs = compiler(seconds=0.3)
    wait(outputs, asking(regex="load"))  # the package, which takes longer
    monkeypatch.setattr(StructuredOutputs, "_compile", slow)
    for i in range(4):
        with pytest.raises(RequestError, match=r"not compiled within 0\.3 s"):
            wait(outputs, asking(regex=f"slow{i}"))
        if i < 3:
            wait(outputs, asking(regex=f"fast{i}"))
    with pytest.raises(RequestError, match=r"4 structured outputs that took more than 0\.3 s"):
        outputs.prepare(asking(regex="fast"))
    go_on.set()
    end = time.monotonic() + 10
    while True:
        try:
            wait(outputs, asking(regex="fast"))
        except RequestError:
            assert time.monotonic() < end
            time.sleep(0.02)
        else:
            break


def test_alternatives_that_refer_to_one_another_are_compared_quickly() -> None:
    names = ("a", "b", "c")
    levels: dict[str, Any] = {
        f"L{i}": {
            "type": "object",
            "required": list(names),
            "properties": {name: {"$ref": f"#/$defs/L{i + 1}"} for name in names},
        }
        for i in range(25)
    }
    levels["L25"] = {"type": "string"}
    both = [{"$ref": "#/$defs/L0"}, {"$ref": "#/$defs/L0"}]
    start = time.monotonic()
    with pytest.raises(RequestError, match="at #/oneOf/1"):
        wait(compiler(), asking(json=json.dumps({"$defs": levels, "oneOf": both})))
    assert time.monotonic() - start < 5
