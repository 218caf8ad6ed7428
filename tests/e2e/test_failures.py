"""A step that breaks, numbers that are none, callers that come and go: the engine lives on.

Every test ends with it doing its work as if nothing had happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from e2e.callers import GREEDY, MAX_LEN, PROMPT, assert_works, generate, open_llm
from e2e.engines import VOCAB, Models, assert_idle, make_engine, random_prompt, run, token_ids
from paceline import LLM
from paceline.core.step import ModelRunnerOutput, SchedulerOutput
from paceline.errors import EngineError, PacelineError, RequestError
from paceline.sampling_params import SamplingParams

# ---- while others run ----------------------------------------------------------------------------


def test_bad_requests_do_not_disturb_a_stream(llm: LLM, expected: list[int]) -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: generate(llm, [[]]),
        lambda: generate(llm, [[-1]]),
        lambda: generate(llm, [[5] * MAX_LEN]),
        lambda: generate(llm, [PROMPT], SamplingParams(logprobs=99)),
        lambda: generate(llm, [PROMPT], SamplingParams(logit_bias={VOCAB + 100: 1.0})),
        lambda: next(llm.stream([1.5], GREEDY)),  # type: ignore[list-item]
        lambda: llm.chat([]),
    ]
    seen = []
    for output in llm.stream(PROMPT, GREEDY):
        seen.append(output.outputs[0].token_ids)
        if wrong:
            with pytest.raises(RequestError):
                wrong.pop()()
    assert not wrong
    assert seen[-1] == expected
    assert all(ids == expected[: len(ids)] for ids in seen)
    assert_works(llm, expected)


def test_other_requests_are_served_while_a_stream_is_read(llm: LLM, expected: list[int]) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    first = next(stream)
    assert 0 < len(first.outputs[0].token_ids) < 30
    assert token_ids(generate(llm, [PROMPT, random_prompt(40)]))[0] == expected
    *_, last = stream
    assert last.outputs[0].token_ids == expected
    assert last.finished
    assert_works(llm, expected)


class Breakdown:
    """Fails one launch of a runner, in place of its work or behind it."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        self.calls = 0
        self.fail_at = 0
        self._error = error
        self._launch = llm.engine.core.runner.launch
        monkeypatch.setattr(llm.engine.core.runner, "launch", self)

    def __call__(self, out: SchedulerOutput) -> ModelRunnerOutput:
        self.calls += 1
        if self.calls == self.fail_at:
            if self.calls % 2:
                self._launch(out)
            raise self._error
        result: ModelRunnerOutput = self._launch(out)
        return result


@pytest.mark.parametrize("fail_at", [1, 2, 3, 6])
def test_step_that_raises(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """All unfinished requests are lost and told so; the engine goes on with new ones."""
    breakdown = Breakdown(llm, monkeypatch, ValueError("the device is on fire"))
    breakdown.fail_at = fail_at
    prompts = [PROMPT, random_prompt(50), random_prompt(3)]
    with pytest.raises(
        EngineError,
        match=r"ValueError: the device is on fire\); 3 unfinished requests were dropped",
    ) as caught:
        generate(llm, prompts)
    assert isinstance(caught.value.__cause__, ValueError)
    assert breakdown.calls == fail_at
    assert_works(llm, expected)
    assert token_ids(generate(llm, prompts))[0] == expected


def test_step_that_raises_ends_streams_with_an_error(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [llm.stream(PROMPT, GREEDY) for _ in range(2)]
    for stream in streams:
        next(stream)
    breakdown = Breakdown(llm, monkeypatch, RuntimeError("gone"))
    breakdown.fail_at = 1
    with pytest.raises(EngineError, match="RuntimeError: gone"):
        list(streams[0])
    with pytest.raises(EngineError, match="dropped"):
        list(streams[1])
    assert_works(llm, expected)


def test_keyboard_interrupt_leaves_a_usable_engine(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    breakdown = Breakdown(llm, monkeypatch, KeyboardInterrupt())
    for fail_at in (2, 3):
        breakdown.calls, breakdown.fail_at = 0, fail_at
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [PROMPT, random_prompt(30)])
        assert_works(llm, expected)


def test_interrupt_between_steps_drops_only_the_callers_requests(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between steps the engine is whole: a stream that others read survives."""
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("paceline.llm._Progress.show", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [random_prompt(30)] * 3)
    *_, last = stream
    assert last.outputs[0].token_ids == expected
    assert_works(llm, expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory for text")])
def test_failure_behind_a_step_leaves_a_usable_engine(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """While outputs are made of a step's results, some requests have ended and others have not."""

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("paceline.engine.output_processor.OutputProcessor.output", fail)
        with pytest.raises((KeyboardInterrupt, EngineError)):
            generate(llm, [PROMPT, random_prompt(30)], [GREEDY, SamplingParams(max_tokens=2)])
    assert_works(llm, expected)
    assert not llm.engine.has_unfinished_requests


# ---- numbers that are none -----------------------------------------------------------------------


@pytest.fixture
def poisoned(models: Models, tmp_path: Path) -> Callable[[str, int], Path]:
    """A copy of the model with NaN in a row of one weight."""

    def poison(name: str, row: int) -> Path:
        path = tmp_path / f"nan-{name}-{row}"
        path.mkdir()
        for file in models.tiny().iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        weights = load_file(path / "model.safetensors")
        weights[name][row] = torch.nan
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return poison


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=1, n=2, top_p=0.9, logprobs=1)])
@pytest.mark.parametrize("k", [0, 3])
def test_model_of_nan_ends_with_an_error(
    poisoned: Callable[[str, int], Path], sampling: SamplingParams, k: int
) -> None:
    path = poisoned("model.norm.weight", 3)
    drafting = {"speculative_model": str(path), "num_speculative_tokens": k} if k else {}
    with open_llm(path, **drafting) as llm:
        for output in generate(llm, [PROMPT, [4]], sampling):
            assert output.finished
            assert output.error is not None
            assert "not finite" in output.error
            assert "hint:" in output.error
            for done in output.outputs:
                assert done.finish_reason == "error"
                assert done.token_ids == []
        assert_idle(llm.engine)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("k", [0, 3])
def test_sequence_that_meets_nan_spoils_nobody(
    models: Models, expected: list[int], poisoned: Callable[[str, int], Path], k: int, delay: int
) -> None:
    """One token's embedding is NaN: whoever comes to it fails, the others do not."""
    prompts = [PROMPT, random_prompt(30), random_prompt(41)]
    healthy = token_ids(run(make_engine(models.tiny()), prompts, GREEDY))
    used = {*PROMPT, *prompts[1], *expected, *healthy[1], *prompts[2]}
    count, bad = next((i + 1, t) for i, t in enumerate(healthy[2]) if i > 4 and t not in used)
    path = poisoned("model.embed_tokens.weight", bad)
    drafting = {"speculative_model": str(path), "num_speculative_tokens": k} if k else {}
    engine = make_engine(path, delay=delay, **drafting)
    outputs = run(
        engine,
        [*prompts, [*PROMPT, bad]],
        [GREEDY, GREEDY, SamplingParams(temperature=0, max_tokens=30, logprobs=1), GREEDY],
    )
    assert token_ids(outputs[:2]) == [expected, healthy[1]]
    for output in outputs[2:]:
        assert output.outputs[0].finish_reason == "error"
        assert output.error is not None
        assert "not finite" in output.error
    late = outputs[2].outputs[0]
    # All tokens up to the one behind which the model broke, however many a step brought.
    assert late.token_ids == healthy[2][:count]
    assert late.token_ids[-1] == bad
    assert late.logprobs is not None
    assert len(late.logprobs) == count
    assert outputs[3].outputs[0].token_ids == []
    # Blocks that held NaN were handed out again without harm.
    assert token_ids(run(engine, [PROMPT] * 6, GREEDY)) == [expected] * 6


@pytest.mark.parametrize("delay", [0, 1])
def test_rejected_draft_that_leads_to_nan_does_no_harm(
    models: Models,
    expected: list[int],
    poisoned: Callable[[str, int], Path],
    tmp_path: Path,
    delay: int,
) -> None:
    """A drafter that always proposes the token on which the target breaks."""
    bad = next(token for token in range(VOCAB) if token not in {*PROMPT, *expected})
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    for file in models.tiny().iterdir():
        (drafter / file.name).write_bytes(file.read_bytes())
    weights = load_file(drafter / "model.safetensors")
    weights["lm_head.weight"][:] = 0.0
    weights["model.norm.weight"][:] = 0.0
    save_file(weights, drafter / "model.safetensors", metadata={"format": "pt"})
    # All logits are 0, so that the bias of the request decides what is drafted.
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={bad: 1e-6})
    engine = make_engine(
        poisoned("model.embed_tokens.weight", bad),
        delay=delay,
        speculative_model=str(drafter),
        num_speculative_tokens=3,
    )
    output = run(engine, [PROMPT], sampling)[0]
    assert output.error is None
    assert output.outputs[0].token_ids == expected
    assert engine.stats.num_accepted_tokens == 0
    # No draft was of use. A card computes a spoilt row again in a step of its own, a CPU at once.
    again = 1 + delay if engine.config.device == "cuda" else 0
    assert engine.stats.num_decode_passes <= len(expected) - 1 + again


def test_drafter_of_nan_costs_drafts_only(
    models: Models, expected: list[int], poisoned: Callable[[str, int], Path]
) -> None:
    drafter = poisoned("model.norm.weight", 0)
    engine = make_engine(models.tiny(), speculative_model=str(drafter), num_speculative_tokens=4)
    outputs = run(engine, [PROMPT, random_prompt(40)], GREEDY)
    assert outputs[0].outputs[0].token_ids == expected
    assert engine.stats.num_draft_tokens > 0


# ---- coming and going ----------------------------------------------------------------------------


def test_close_twice_and_use_after(models: Models) -> None:
    llm = open_llm(models.tiny())
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for use in (
        lambda: generate(llm),
        lambda: next(llm.stream(PROMPT, GREEDY)),
        lambda: llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False),
        lambda: list(stream),
    ):
        with pytest.raises(EngineError, match="closed"):
            use()
    with pytest.raises(EngineError, match="closed"), llm:
        generate(llm)


@pytest.mark.parametrize("after", [1, 3])
def test_leaving_a_stream_frees_its_blocks(llm: LLM, expected: list[int], after: int) -> None:
    for number, output in enumerate(llm.stream(random_prompt(60), GREEDY), 1):
        assert not output.finished
        if number == after:
            break
    # The generator is gone as soon as nothing refers to it.
    assert_idle(llm.engine)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm.engine)
    assert_works(llm, expected)


def test_two_engines_in_one_process(models: Models, expected: list[int]) -> None:
    other_expected = models.greedy("llama", PROMPT, 20)
    with open_llm(models.tiny()) as one, open_llm(models.family("llama")) as other:
        streams = [one.stream(PROMPT, GREEDY), other.stream(PROMPT, GREEDY)]
        last: list[Any] = [None, None]
        alive = [0, 1]
        while alive:
            for i in list(alive):
                try:
                    last[i] = next(streams[i]).outputs[0].token_ids
                except StopIteration:
                    alive.remove(i)
        assert last[0] == expected
        assert last[1][:20] == other_expected
    with pytest.raises(EngineError, match="closed"):
        generate(one)


def test_generate_from_several_threads(llm: LLM, expected: list[int]) -> None:
    """One batch for all; everyone gets the own outputs, and an error stays with its caller."""
    barrier = threading.Barrier(4)
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        torch.set_num_threads(1)  # the setting is a thread's own
        barrier.wait()
        try:
            if number == 3:
                found[number] = generate(llm, [[-1]])
            elif number == 2:
                found[number] = [list(llm.stream(PROMPT, GREEDY))[-1]]
            else:
                prompts = [random_prompt(5 + number), PROMPT] * 3
                found[number] = generate(llm, prompts)
        except PacelineError as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert isinstance(found[3], RequestError)
    assert token_ids(found[2]) == [expected]
    for number in (0, 1):
        ids = token_ids(found[number])
        assert ids[1] == ids[3] == ids[5] == expected
        assert ids[0] == ids[2] == ids[4] != expected
        assert [len(o.prompt_token_ids) for o in found[number]] == [5 + number, 40] * 3
    assert_works(llm, expected)
