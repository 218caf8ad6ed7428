"""Where a sequence ends when a step brings many tokens: ids, text and counts follow the cut.

Whatever stops a sequence must stop it after the same token with and without speculation. The
drafter is the target itself, so that nearly every step brings k + 1 tokens, or a lookup in an
output that repeats itself.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from e2e.engines import (
    PROMPT,
    Models,
    Script,
    add,
    drain,
    engine_with,
    make_engine,
    one,
    random_prompt,
    row_column,
    run,
    text_of_tokens,
    token_ids,
    token_text,
    unique_piece,
)
from paceline.engine.llm_engine import LLMEngine
from paceline.outputs import RequestOutput
from paceline.sampling_params import SamplingParams

K = 5
LONG = 40
GREEDY = {"temperature": 0, "ignore_eos": True}
# Sampled from few ids, so that n-grams recur.
NARROW = {"temperature": 0.7, "seed": 6, "ignore_eos": True, "logit_bias": {65: 40, 66: 40, 67: 40}}
DRAFTERS = ["none", "self", "lookup"]


def facts(output: RequestOutput) -> tuple[Any, ...]:
    """What must not depend on speculation."""
    done = output.outputs[0]
    return done.token_ids, done.text, done.finish_reason, done.stop_reason


# ---- length --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, K, K + 1, K + 2, 17])
def test_max_tokens_is_exact(engines: dict[str, LLMEngine], count: int) -> None:
    full = one(engines["none"], max_tokens=LONG, **GREEDY).outputs[0].token_ids
    for name, engine in engines.items():
        done = one(engine, max_tokens=count, **GREEDY).outputs[0]
        assert done.token_ids == full[:count], name
        assert (done.finish_reason, done.stop_reason) == ("length", None)


@pytest.mark.parametrize("count", [1, 2, K, K + 1, K + 2, 17])
def test_max_tokens_does_not_rest_on_the_device(models: Models, count: int) -> None:
    """A runner that goes on beyond the limit, a step ahead of the host: its results are cut."""
    engine = engine_with(models, "self", delay=1)
    full = one(engine, max_tokens=LONG, **GREEDY).outputs[0].token_ids
    runner = engine.core.runner
    collect = runner.collect

    @torch.inference_mode()
    def forget_limits(handle: Any) -> Any:
        row_column(engine, "max_total")[:] = 1000
        row_column(engine, "active")[:] = True
        return collect(handle)

    runner.collect = forget_limits  # type: ignore[method-assign]
    before = engine.stats.num_generation_tokens
    done = one(engine, max_tokens=count, **GREEDY).outputs[0]
    assert done.token_ids == full[:count]
    assert done.finish_reason == "length"
    assert engine.stats.num_generation_tokens - before == count


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", DRAFTERS)
def test_device_knows_stop_ids_and_lengths(models: Models, name: str, delay: int) -> None:
    """Rows go inactive in the step that ends them, before the host has seen a result."""
    engine = engine_with(models, name, delay=delay)
    ids = one(engine, max_tokens=LONG, **GREEDY).outputs[0].token_ids
    params = [
        SamplingParams(max_tokens=9, **GREEDY),
        SamplingParams(max_tokens=LONG, stop_token_ids=[ids[7]], **GREEDY),
        SamplingParams(max_tokens=1, **GREEDY),
    ]
    active = row_column(engine, "active")
    add(engine, [PROMPT] * len(params), params)
    while engine.core.has_work:
        engine.step()
        running = engine.core.scheduler.table.occupied
        assert (np.asarray(active.tolist()) <= running).all()
    assert not active.any()


@pytest.mark.parametrize("room", [1, 2, K, K + 1, 12])
def test_model_length_is_exact(models: Models, room: int) -> None:
    """Without max_tokens the context's end is the limit, and a drafter may not pass it."""
    for delay, name in [(0, "none"), (0, "self"), (1, "self"), (1, "lookup")]:
        engine = engine_with(models, name, delay=delay, max_model_len=60)
        done = one(engine, random_prompt(60 - room), max_tokens=None, **GREEDY).outputs[0]
        assert len(done.token_ids) == room
        assert done.finish_reason == "length"
        longer = one(engine, random_prompt(60 - room), max_tokens=room + 5, **GREEDY).outputs[0]
        assert longer.token_ids == done.token_ids


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", DRAFTERS)
def test_lone_sequence_in_a_pool_of_exactly_its_size(models: Models, name: str, delay: int) -> None:
    for prompt_len, count in [(16, 1), (16, 17), (17, 16), (1, 48), (30, 3)]:
        blocks = math.ceil((prompt_len + count - 1) / 16)
        engine = engine_with(models, name, delay=delay, num_gpu_blocks_override=blocks)
        done = one(engine, random_prompt(prompt_len), max_tokens=count, **GREEDY).outputs[0]
        assert len(done.token_ids) == count
        assert engine.stats.num_preemptions == 0


# ---- what came first -----------------------------------------------------------------------------


def test_each_position_can_be_the_stop(engines: dict[str, LLMEngine]) -> None:
    """A stop id at every place of a run: the id ends the output and is part of it."""
    full = one(engines["none"], max_tokens=LONG, **GREEDY).outputs[0].token_ids
    places = [place for place in range(2 * K + 4) if full.index(full[place]) == place]
    assert {place % (K + 1) for place in places} == set(range(K + 1))
    for name, engine in engines.items():
        params = [
            SamplingParams(max_tokens=LONG, stop_token_ids=[full[place]], **GREEDY)
            for place in places
        ]
        for place, output in zip(places, run(engine, [PROMPT] * len(places), params), strict=True):
            done = output.outputs[0]
            assert done.token_ids == full[: place + 1], name
            assert (done.finish_reason, done.stop_reason) == ("stop", full[place])


@pytest.mark.parametrize("name", DRAFTERS)
def test_results_of_an_earlier_owner_of_a_row_are_dropped(models: Models, name: str) -> None:
    """One step behind, results of an aborted sequence come when its row serves another."""
    prompts = [random_prompt(9, seed) for seed in range(6)]
    sampling = SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids(run(engine_with(models, "none"), prompts, sampling))
    engine = engine_with(models, name, delay=1, max_num_seqs=2)
    add(engine, prompts, sampling)
    found = {}
    for step in range(4):
        for _ in range(2 + step % 2):
            found.update({o.request_id: o for o in engine.step() if o.finished})
        found |= {o.request_id: o for o in engine.abort_request(str(step))}
    found |= drain(engine)
    aborted = [n for n in found if found[n].outputs[0].finish_reason == "abort"]
    assert len(aborted) > 1
    for number, output in found.items():
        ids = output.outputs[0].token_ids
        assert ids == expected[int(number)][: len(ids)]
        assert len(ids) == 20 or number in aborted


def test_end_of_text_has_no_stop_reason(engines: dict[str, LLMEngine]) -> None:
    """The model's own stop ids: reason "stop" without a name, text without the token."""
    eos = min(engines["none"]._admission.eos_token_ids)
    results = []
    for engine in engines.values():
        output = one(engine, max_tokens=LONG, temperature=2.0, seed=3, logit_bias={eos: 14.0})
        done = output.outputs[0]
        assert 2 <= len(done.token_ids) < LONG
        assert done.token_ids[-1] == eos
        assert eos not in done.token_ids[:-1]
        assert (done.finish_reason, done.stop_reason) == ("stop", None)
        assert "<|" not in done.text
        results.append(facts(output))
        ignored = one(
            engine,
            max_tokens=LONG,
            temperature=2.0,
            seed=3,
            logit_bias={eos: 14.0},
            ignore_eos=True,
        )
        assert ignored.outputs[0].token_ids[: len(done.token_ids)] == done.token_ids
        assert len(ignored.outputs[0].token_ids) == LONG
    assert results == results[:1] * len(results)


def test_stop_strings_cut_to_the_token(engines: dict[str, LLMEngine]) -> None:
    """Every piece of the text, one to nine characters long, as a stop string.

    Such strings begin and end inside tokens, span several tokens, and several steps.
    """
    plain = engines["none"]
    text, pieces = text_of_tokens(plain, one(plain, max_tokens=LONG, **GREEDY))
    stops = sorted({text[i : i + n] for i in range(0, 36, 2) for n in (1, 2, 5, 9)})
    stops = [
        stop for stop in stops if "\ufffd" not in stop
    ]  # bytes that may yet become a character
    assert len(stops) > 25
    spans = []
    params, expected = [], []
    for stop in stops:
        start = text.index(stop)
        # The first token after which the text holds the string is the last one.
        count = next(i for i in range(1, LONG + 1) if stop in "".join(pieces[:i]))
        before = next(i for i in range(LONG) if len("".join(pieces[: i + 1])) > start)
        spans.append(count - before)
        for include in (False, True):
            end = start + len(stop) if include else start
            params.append(
                SamplingParams(
                    max_tokens=LONG, stop=[stop], include_stop_str_in_output=include, **GREEDY
                )
            )
            expected.append((count, text[:end], stop))
    assert {1, 2, 3} <= set(spans)
    for name, engine in engines.items():
        for output, (count, cut, stop) in zip(
            run(engine, [PROMPT] * len(params), params), expected, strict=True
        ):
            done = output.outputs[0]
            assert (len(done.token_ids), done.text) == (count, cut), (name, stop)
            assert (done.finish_reason, done.stop_reason) == ("stop", stop)


def test_the_first_stop_names_the_reason(engines: dict[str, LLMEngine]) -> None:
    plain = engines["none"]
    full = one(plain, max_tokens=LONG, **GREEDY)
    ids = full.outputs[0].token_ids
    text, pieces = text_of_tokens(plain, full)
    place, stop = unique_piece(text, pieces, K + 3)
    assert place + 3 < LONG
    early, late = ids[place - 1], ids[place + 1]
    cases: list[tuple[dict[str, Any], int, str, Any]] = [
        ({"stop": stop, "max_tokens": place + 1}, place + 1, "stop", stop),
        ({"stop": stop, "max_tokens": place}, place, "length", None),
        ({"stop": stop, "stop_token_ids": [early]}, place, "stop", early),
        ({"stop": stop, "stop_token_ids": [late]}, place + 1, "stop", stop),
        ({"stop": stop, "stop_token_ids": [ids[place]]}, place + 1, "stop", ids[place]),
        ({"stop_token_ids": [late], "max_tokens": place + 2}, place + 2, "stop", late),
        ({"stop_token_ids": [late], "max_tokens": place + 1}, place + 1, "length", None),
        ({"stop": ["never found", stop, text[-3:]]}, place + 1, "stop", stop),
    ]
    for name, engine in engines.items():
        params = [SamplingParams(**{"max_tokens": LONG} | GREEDY | case) for case, *_ in cases]
        for output, (case, count, reason, why) in zip(
            run(engine, [PROMPT] * len(cases), params), cases, strict=True
        ):
            done = output.outputs[0]
            assert done.token_ids == ids[:count], (name, case)
            assert (done.finish_reason, done.stop_reason) == (reason, why), (name, case)


def test_reasons_do_not_depend_on_speculation(engines: dict[str, LLMEngine]) -> None:
    """Random stops of all kinds on outputs that repeat themselves."""
    params = [
        SamplingParams(
            **NARROW | {"seed": seed},
            max_tokens=10 + 3 * (seed % 11),
            stop_token_ids=[[65], [66], [], [200]][seed % 4],
            stop=[["aab"], ["bcb", "ca"], ["cc", "zz"], []][(seed // 4) % 4],
            min_tokens=[0, 0, 3, 9][(seed // 16) % 4],
        )
        for seed in range(48)
    ]
    found = {
        name: [facts(output) for output in run(engine, [PROMPT] * len(params), params)]
        for name, engine in engines.items()
    }
    assert found["self"] == found["none"]
    assert found["lookup"] == found["none"]
    reasons = {(reason, type(why)) for *_, reason, why in found["none"]}
    assert reasons == {("stop", int), ("stop", str), ("length", type(None))}
    assert engines["lookup"].stats.num_accepted_tokens > 0


def test_min_tokens(engines: dict[str, LLMEngine]) -> None:
    """No stop id before that many tokens, and no stop string in their text."""
    plain = engines["none"]
    first, second = one(plain, max_tokens=2, **GREEDY).outputs[0].token_ids
    word = token_text(plain, 66)
    for name, engine in engines.items():
        # A stop id is forbidden where it would come too early, so the text goes another way.
        forbidden = {"stop_token_ids": [second], "min_tokens": 9, "max_tokens": LONG, **GREEDY}
        output = one(engine, **forbidden)
        assert facts(output) == facts(one(plain, **forbidden)), name
        assert output.outputs[0].token_ids[0] == first
        assert second not in output.outputs[0].token_ids[:9]
        # Of a text that is one word again and again, the tenth ends it.
        done = one(
            engine, stop=word, min_tokens=9, max_tokens=LONG, logit_bias={66: 90.0}, **GREEDY
        ).outputs[0]
        assert done.token_ids == [66] * 10
        assert (done.text, done.stop_reason) == (word * 9, word)


# ---- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", DRAFTERS)
def test_counters_follow_the_cut(models: Models, name: str, delay: int) -> None:
    """Tokens and drafts behind a stop are not counted, by the engine or by the requests."""
    engine = engine_with(models, name, delay=delay)
    params = [
        SamplingParams(
            **NARROW | {"seed": seed},
            max_tokens=6 + seed,
            stop_token_ids=[66] if seed % 3 else [],
            stop=["cab", "bca"] if seed % 2 else [],
            n=1 + seed % 2,
        )
        for seed in range(20)
    ]
    outputs = run(engine, [PROMPT] * len(params), params)
    stats = engine.stats
    produced = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    assert stats.num_generation_tokens == produced
    assert stats.num_finished == sum(sampling.n for sampling in params)
    drafts = [output.metrics.speculative_decoding for output in outputs]
    assert stats.num_drafts == sum(d.num_drafts for d in drafts)
    assert stats.num_draft_tokens == sum(d.num_draft_tokens for d in drafts)
    assert stats.num_accepted_tokens == sum(d.num_accepted_tokens for d in drafts)
    assert stats.num_accepted_tokens == int(stats.accepted_by_position.sum())
    assert stats.num_draft_tokens == int(stats.proposed_by_position.sum())
    for output, one_drafts in zip(outputs, drafts, strict=True):
        # A sequence's first token is no draft; all others may be.
        most = sum(len(c.token_ids) - 1 for c in output.outputs)
        assert one_drafts.num_accepted_tokens <= most
    if name == "self":
        assert stats.acceptance_rate == 1.0
    assert (stats.num_draft_tokens > 0) == (name != "none")


def test_accepted_tokens_of_a_cut_run(models: Models, target: Path) -> None:
    """Self-draft, a stop at each place of the second run: k + 1 tokens of which `place` stay."""
    plain = make_engine(target)
    full = one(plain, max_tokens=LONG, **GREEDY).outputs[0].token_ids
    for place in range(1, 2 * K):
        if full.index(full[place]) != place:
            continue
        engine = engine_with(models, "self")
        output = one(engine, max_tokens=LONG, stop_token_ids=[full[place]], **GREEDY)
        assert len(output.outputs[0].token_ids) == place + 1
        drafts = output.metrics.speculative_decoding
        # `place` tokens follow the first; each run's last is a sample of the target's, unless cut.
        rounds, rest = divmod(place, K + 1)
        assert drafts.num_accepted_tokens == rounds * K + rest
        assert drafts.num_draft_tokens == drafts.num_accepted_tokens
        assert engine.stats.num_generation_tokens == place + 1


def test_times_and_cached_tokens(models: Models) -> None:
    engine = engine_with(models, "self")
    run(engine, [random_prompt(140)], SamplingParams(max_tokens=2, **GREEDY))
    metrics = one(engine, random_prompt(140), max_tokens=20, **GREEDY).metrics
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    ]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]
    assert metrics.num_cached_tokens == 128


def test_policy_hears_of_what_was_committed(models: Models) -> None:
    """The outcomes a policy sees add up to what the engine counted."""
    policy = Script(K)
    engine = engine_with(models, "lookup", policy=policy)
    params = [
        SamplingParams(**NARROW | {"seed": s}, max_tokens=9 + s, stop=["ab"]) for s in range(9)
    ]
    add(engine, [PROMPT] * len(params), params)
    drain(engine)
    outcomes, stats = policy.outcomes, engine.stats
    assert sum(o.num_committed_tokens for o in outcomes) == stats.num_generation_tokens
    assert sum(o.num_draft_tokens for o in outcomes) == stats.num_draft_tokens
    assert sum(o.num_accepted_tokens for o in outcomes) == stats.num_accepted_tokens


def test_text_is_never_half_a_character(engines: dict[str, LLMEngine]) -> None:
    """Streams of random bytes: deltas are whole characters, and add up to the text."""
    for engine in engines.values():
        wild = {"temperature": 3.0, "seed": 1, "ignore_eos": True, "max_tokens": 60}
        request = engine.make_request("s", PROMPT, SamplingParams(**wild), stream=True)
        engine.add_request(request)
        texts, ids = [""], []
        while engine.core.has_work:
            for output in engine.step():
                done = output.outputs[0]
                assert done.text.startswith(texts[-1])
                assert done.token_ids[: len(ids)] == ids
                ids = done.token_ids
                texts.append(done.text)
        assert engine.tokenizer is not None
        assert texts[-1] == engine.tokenizer.decode(ids)
        assert "\ufffd" in texts[-1]  # bytes that are no character at all
        assert len(ids) == 60
        assert token_ids([one(engine, **wild)]) == [ids]
