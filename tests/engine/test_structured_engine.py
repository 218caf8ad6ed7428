"""Structured outputs through the whole engine: what comes out has the form that was asked for.

With speculation and without, beside unrestricted requests, through preemption, and to every kind of
end. Random models at temperature 1 know nothing of any form, so all form comes from the masks.
"""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from e2e.engines import Models, Script, add, drain, engine_with, make_engine, run, tokens
from paceline.engine.llm_engine import LLMEngine
from paceline.engine.structured import SequenceGrammar
from paceline.errors import RequestError
from paceline.outputs import RequestOutput
from paceline.sampling_params import SamplingParams, StructuredOutputsParams
from paceline.worker.row_grammars import DEAD_END

pytest.importorskip("xgrammar")

PROMPTS = ["In a paceline the riders", "def add(first", "x", [5, 6, 7]]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "next"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("structured-models"))


@pytest.fixture(scope="module")
def plain(models: Models) -> Iterator[LLMEngine]:
    engine = engine_with(models, "none", max_model_len=256)
    yield engine
    engine.close()


def asking(structure: dict[str, Any], **sampling: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**structure)
    return SamplingParams(structured_outputs=structured, **{"max_tokens": 96, **sampling})


def is_person(text: str) -> bool:
    person = json.loads(text)
    assert set(person) <= set(SCHEMA["properties"])  # type: ignore[call-overload]
    assert len(person["name"]) <= 6
    assert 0 <= person["age"] <= 130
    assert type(person["age"]) is int
    assert person["next"] in (None, True, False)
    tags = person.get("tags", [])
    return len(tags) <= 2 and all(tag in ("a", "b", 3) for tag in tags)


LANGUAGES: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json": SCHEMA, "disable_any_whitespace": True}, is_person),
    ({"json": {"type": "array", "items": {"type": "number"}, "minItems": 2}}, json.loads),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"regex": r"(ab|[0-9]){2,5}-[^a-z]é?"}, re.compile(r"(ab|[0-9]){2,5}-[^a-z]é?").fullmatch),
    ({"choice": ["yes", "no", 'a "b"\n', "é🙂"]}, ["yes", "no", 'a "b"\n', "é🙂"].__contains__),
    ({"grammar": 'root ::= "x" | "(" root ")"'}, re.compile(r"\(*x\)*").fullmatch),
    ({"grammar": 'start: A ("," A)*\nA: /[0-9]{1,3}/'}, re.compile("[0-9,]+").fullmatch),
]


@pytest.mark.parametrize(("structure", "matches"), LANGUAGES, ids=lambda x: str(x)[:30])
def test_what_ends_is_whole_and_what_is_cut_is_a_beginning(
    plain: LLMEngine, structure: dict[str, Any], matches: Callable[[str], Any]
) -> None:
    params = [asking(structure, seed=seed, temperature=1.0) for seed in range(12)]
    ended = 0
    for output in run(plain, [PROMPTS[0]] * len(params), params):
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            assert completion.stop_reason is None
            assert matches(completion.text)
            ended += 1
        else:
            assert completion.finish_reason == "length"
            assert is_beginning(plain, params[0], completion.token_ids)
    assert ended > 0


def is_beginning(engine: LLMEngine, sampling: SamplingParams, ids: list[int]) -> bool:
    structured = engine._admission.structured
    assert structured is not None
    grammar = structured.sequence_grammars(sampling)[0]
    grammar.accept(np.array(ids, np.int32))
    words = np.zeros((1, 4096), np.int32)[:, : -(-engine.config.model.arch.vocab_size // 32)]
    return grammar.fill(np.zeros(0, np.int32), np.ascontiguousarray(words)) == 0


def test_every_answer_validates_against_its_schema(plain: LLMEngine) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas: list[Any] = [
        SCHEMA,
        {"type": "string", "pattern": "^[a-f]{2,4}$"},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
        {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
        {"type": "array", "prefixItems": [{"const": "k"}, {"type": "boolean"}], "items": False},
        {
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
                    "required": ["n"],
                }
            },
            "$ref": "#/$defs/n",
        },
        {
            "properties": {"k": {"type": "null"}},
            "required": ["k"],
            "additionalProperties": {"type": "boolean"},
            "maxProperties": 2,
        },
        {"maxLength": 2},
    ]
    params = [
        asking({"json": schema, "disable_any_whitespace": True}, seed=seed)
        for schema in schemas
        for seed in range(3)
    ]
    outputs = run(plain, ["a"] * len(params), params)
    ended = [o.outputs[0].finish_reason == "stop" for o in outputs]
    assert sum(ended) > len(ended) // 2
    for output, place in zip(outputs, range(len(outputs)), strict=True):
        if ended[place]:
            jsonschema.validate(json.loads(output.outputs[0].text), schemas[place // 3])


# ---- speculation -----------------------------------------------------------------------------

MIXED = [
    asking({"json": SCHEMA}, seed=1, temperature=0.8, max_tokens=40, logprobs=2),
    SamplingParams(seed=2, max_tokens=20, ignore_eos=True),
    asking({"regex": "[a-z ]{30,60}"}, seed=3, max_tokens=24, top_p=0.9, frequency_penalty=0.5),
    asking({"choice": ["yes", "no"]}, temperature=0),
    asking({"json_object": True}, seed=5, max_tokens=30, logit_bias={7: 3.0}, min_tokens=12),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    asking({"regex": "[ab]{20}"}, seed=6, stop=["bb"], n=2),
]
MIXED_PROMPTS = [PROMPTS[i % 4] for i in range(len(MIXED))]


@pytest.fixture(scope="module")
def expected(plain: LLMEngine) -> list[RequestOutput]:
    return run(plain, MIXED_PROMPTS, MIXED)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("drafter", ["self", "near", "random", "lookup"])
def test_the_same_tokens_with_speculation(
    models: Models, expected: list[RequestOutput], drafter: str, delay: int
) -> None:
    engine = engine_with(models, drafter, k=3, max_model_len=256, delay=delay)
    found = run(engine, MIXED_PROMPTS, MIXED)
    assert tokens(found) == tokens(expected)
    assert [[c.text for c in o.outputs] for o in found] == [
        [c.text for c in o.outputs] for o in expected
    ]
    restricted = [
        o for o, sampling in zip(found, MIXED, strict=True) if sampling.structured_outputs
    ]
    drafts = [o.metrics.speculative_decoding for o in restricted]
    assert sum(d.num_draft_tokens for d in drafts) > sum(d.num_accepted_tokens for d in drafts)
    if drafter == "self":
        assert sum(d.num_accepted_tokens for d in drafts) > 0
    engine.close()


def test_any_draft_length_at_any_step(models: Models, expected: list[RequestOutput]) -> None:
    engine = make_engine(
        models.tiny(),
        policy=Script(0, 4, 1, 0, 0, 3, 2, 4, 1, 0, 2),
        speculative_model=str(models.tiny()),
        num_speculative_tokens=4,
        max_model_len=256,
    )
    assert tokens(run(engine, MIXED_PROMPTS, MIXED)) == tokens(expected)
    engine.close()


def test_static_batches_hold_the_form_too(models: Models, expected: list[RequestOutput]) -> None:
    """Rows that have ended are computed on without a grammar, for nothing."""
    engine = engine_with(models, "near", k=2, max_model_len=256, batching="static")
    assert tokens(run(engine, MIXED_PROMPTS, MIXED)) == tokens(expected)
    engine.close()


@pytest.mark.parametrize("delay", [0, 1])
def test_a_preempted_sequence_goes_on_where_it_was(
    models: Models, expected: list[RequestOutput], delay: int
) -> None:
    engine = engine_with(
        models,
        "near",
        k=2,
        delay=delay,
        max_model_len=64,
        max_num_batched_tokens=64,
        block_size=4,
        num_gpu_blocks_override=17,
    )
    found = run(engine, MIXED_PROMPTS, MIXED)
    assert tokens(found) == tokens(expected)
    assert engine.stats.num_preemptions > 0
    engine.close()


def test_unrestricted_requests_beside_them_stay_the_same(
    plain: LLMEngine, expected: list[RequestOutput]
) -> None:
    free = [i for i, sampling in enumerate(MIXED) if sampling.structured_outputs is None]
    alone = run(plain, [MIXED_PROMPTS[i] for i in free], [MIXED[i] for i in free])
    assert tokens(alone) == tokens([expected[i] for i in free])


# ---- together with other parameters ----------------------------------------------------------


def test_the_logprobs_are_those_of_the_model(
    plain: LLMEngine, expected: list[RequestOutput]
) -> None:
    """Raw: what the tokens would have got as a prompt, though a mask left few others."""
    output = expected[0]
    ids = output.outputs[0].token_ids
    as_prompt = SamplingParams(max_tokens=1, prompt_logprobs=0)
    known = run(plain, [[*output.prompt_token_ids, *ids]], as_prompt)[0].prompt_logprobs
    assert known is not None
    assert output.outputs[0].logprobs is not None
    for token, ours, theirs in zip(
        ids, output.outputs[0].logprobs, known[-len(ids) :], strict=True
    ):
        assert theirs is not None
        assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
        assert ours[token].rank == theirs[token].rank


def test_a_stop_string_cuts_it(plain: LLMEngine) -> None:
    sampling = asking({"regex": "[ab]{20}"}, seed=1, stop=["bb"])
    completion = run(plain, ["x"], sampling)[0].outputs[0]
    assert completion.stop_reason == "bb"
    assert re.fullmatch("[ab]{0,18}", completion.text)


def test_min_tokens_holds_as_long_as_it_can(plain: LLMEngine) -> None:
    longer = asking({"regex": "1+"}, seed=1, min_tokens=9)
    completion = run(plain, ["x"], longer)[0].outputs[0]
    assert len(completion.token_ids) >= 9
    complete = asking({"choice": ["1"]}, seed=1, min_tokens=9)
    completion = run(plain, ["x"], complete)[0].outputs[0]
    assert (completion.text, completion.finish_reason) == ("1", "stop")


def test_a_bias_towards_what_is_forbidden_does_nothing(plain: LLMEngine) -> None:
    assert plain.tokenizer is not None
    forbidden = dict.fromkeys(plain.tokenizer.encode("abc"), 100.0)
    completion = run(plain, ["x"], asking({"regex": "[0-9]{3}"}, logit_bias=forbidden))[0]
    assert re.fullmatch("[0-9]{3}", completion.outputs[0].text)


def test_special_tokens_stay_out_of_it(plain: LLMEngine) -> None:
    assert plain.tokenizer is not None
    special = sorted(plain.tokenizer.special_token_ids)
    sampling = asking({"regex": ".{5}"}, seed=1, logit_bias=dict.fromkeys(special, 50.0))
    ids = run(plain, ["x"], sampling)[0].outputs[0].token_ids
    assert not set(ids[:-1]) & set(special)


# ---- faults ----------------------------------------------------------------------------------


def test_what_cannot_be_used_is_refused_before_anything_is_queued(plain: LLMEngine) -> None:
    with pytest.raises(RequestError, match="at #/type"):
        plain.make_request("bad", "x", asking({"json": {"type": "x"}}))
    with pytest.raises(RequestError, match="line 1, column 1"):
        plain.make_request("bad", "x", asking({"grammar": "é"}))
    with pytest.raises(RequestError, match="`ignore_eos` cannot be used"):
        asking({"regex": "a"}, ignore_eos=True)
    assert not plain.has_unfinished_requests


def test_prepare_does_what_make_request_would_wait_for(plain: LLMEngine) -> None:
    assert plain.prepare(SamplingParams()) is None
    good, bad = asking({"regex": "ready?"}), asking({"regex": "(ready"})
    future = plain.prepare(good)
    assert future is not None
    future.result(timeout=30)
    assert plain.prepare(good) is future
    refused = plain.prepare(bad)
    assert refused is not None
    with pytest.raises(RequestError, match="position 7"):
        refused.result(timeout=30)


class DeadEnd:
    """A grammar that allows the letter ids for some tokens, then nothing."""

    fault = None

    def __init__(self, length: int, token: int) -> None:
        self.length, self.token = length, token
        self.num_tokens = 0

    def accept(self, token_ids: Any) -> None:
        self.num_tokens += len(token_ids)

    def fill(self, drafts: Any, words: Any) -> int:
        left = self.length - self.num_tokens
        words[:left, self.token // 32] = np.int32(1) << (self.token % 32)
        right = [*(drafts == self.token), False].index(False)
        return min(right, left - 1)


@pytest.mark.parametrize("drafter", ["none", "self"])
def test_a_dead_end_fails_its_own_sequence_only(models: Models, drafter: str) -> None:
    engine = engine_with(models, drafter, k=3)
    sampling = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    for name, length in (("free", None), ("at once", 0), ("later", 5)):
        request = engine.make_request(name, "a text", sampling)
        if length is not None:
            request.sequences[0].grammar = DeadEnd(length, 40)
        engine.add_request(request)
    found = drain(engine)
    assert len(found["free"].outputs[0].token_ids) == 12
    for name, length in (("at once", 0), ("later", 5)):
        assert found[name].outputs[0].token_ids == [40] * length
        assert found[name].outputs[0].finish_reason == "error"
        assert found[name].error == DEAD_END
    engine.close()


def test_an_aborted_request_leaves_nothing(models: Models) -> None:
    engine = engine_with(models, "near", k=2)
    add(engine, ["x", "y"], asking({"regex": "[a-z]{80}"}, n=2, max_tokens=90), ["0", "1"])
    for _ in range(5):
        engine.step()
    kept = [
        weakref.ref(grammar._matcher)
        for request in engine._requests.values()
        for grammar in (sequence.grammar for sequence in request.sequences)
        if isinstance(grammar, SequenceGrammar)
    ]
    assert len(kept) == 4
    engine.abort_request("0")
    engine.abort_request("1")
    drain(engine)
    run(engine, ["x"], SamplingParams(max_tokens=2))  # the next step tells the runner
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4
    assert not engine.core.runner.grammars  # type: ignore[attr-defined]
    engine.close()


def test_without_a_tokenizer_it_is_refused(models: Models) -> None:
    engine = make_engine(models.tiny(), skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="need a tokenizer"):
        engine.make_request("0", [5], asking({"regex": "a"}))
    engine.close()
