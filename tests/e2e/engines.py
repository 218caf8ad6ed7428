"""Tiny models of every family with one tokenizer, engines over them, and transformers as oracle.

Every run is checked for more than its tokens: blocks and rows after each step, and that nothing is
held when all requests have ended.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_model import build_tokenizer, write_tiny_model

from models.paged_harness import quiet, save_random
from paceline.engine.llm_engine import LLMEngine
from paceline.engine_args import EngineArgs
from paceline.outputs import RequestOutput
from paceline.sampling_params import SamplingParams
from paceline.spec.policy import DraftChoice, DraftLengthPolicy, DraftOutcome, Load

VOCAB = build_tokenizer().get_vocab_size()  # ids the tokenizer knows; no other may come out
PADDING = 8
WINDOW = 20
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {"rope_parameters": LLAMA3_ROPE, "head_dim": 16},
    "mistral": {"sliding_window": WINDOW, "head_dim": 12},
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


class Models:
    """Model directories made on first use, and transformers' models of the families."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._oracles: dict[str, Any] = {}
        self._greedy: dict[tuple[str, tuple[int, ...], int], list[int]] = {}

    def family(self, name: str) -> Path:
        """A family's target: its padding ids would often win, if they were not masked."""
        path = self._root / name
        if name not in self._oracles:
            eos = build_tokenizer().token_to_id("<|im_end|>")
            size = {"vocab_size": VOCAB + PADDING, "eos_token_id": eos}
            model = save_random(path, name, seed=3, **size, **FAMILIES[name])
            with torch.no_grad():
                model.lm_head.weight[VOCAB:] *= 3.0
            with quiet():
                model.save_pretrained(path)
            for file in TOKENIZER_FILES:
                shutil.copy(self.tiny() / file, path / file)
            self._oracles[name] = model
        return path

    def tiny(self, **options: Any) -> Path:
        """The example model, whose greedy output wanders; ``options`` of ``write_tiny_model``."""
        name = "-".join(["tiny", *(f"{key}={options[key]}" for key in sorted(options))])
        path = self._root / name
        return path if path.exists() else write_tiny_model(path, **options)

    def random_drafter(self) -> Path:
        """One that knows nothing of any target, with another padded vocabulary."""
        return self.tiny(seed=77, num_layers=1, hidden_size=32, vocab_padding=24)

    def greedy(self, family: str, prompt: Sequence[int], count: int) -> list[int]:
        """transformers' greedy continuation; known ids only."""
        key = (family, tuple(prompt), count)
        if key not in self._greedy:
            self.family(family)
            self._greedy[key] = greedy(self._oracles[family], prompt, count)
        return self._greedy[key]


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` times argmax over the logits of the whole sequence."""
    ids = list(prompt)
    for _ in range(count):
        logits = next_logits(model, ids)[:VOCAB]
        first, second = logits.topk(2).values.tolist()
        assert first - second > 1e-4, "a near-tie: rounding could decide, so take another prompt"
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def all_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """transformers' [len(ids), vocab] float32 logits, nothing cached."""
    with torch.no_grad(), quiet():
        logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return logits


def next_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[vocab] logits of the token after ``ids``."""
    return all_logits(model, ids)[-1]


def transformers_model(path: Path) -> Any:
    """What transformers makes of a directory, in float32."""
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(VOCAB - 3) for _ in range(length)]


PROMPT = random_prompt(23)


def make_engine(
    path: Path, *, delay: int = 0, policy: DraftLengthPolicy | None = None, **args: Any
) -> LLMEngine:
    """A float32 engine; ``args`` as a user writes them."""
    arguments = {"dtype": "float32", "max_num_seqs": 8, **args}
    config = EngineArgs.from_kwargs(model=str(path), **arguments).resolve()
    return LLMEngine(config, delay=delay, policy=policy, log_stats=False)


def engine_with(models: Models, drafter: str, *, k: int = 5, **args: Any) -> LLMEngine:
    """The example model with no drafter ("none"), itself, a near or a random one, or a lookup."""
    paths = {
        "self": models.tiny,
        "near": lambda: models.tiny(perturb=0.05, vocab_padding=24),
        "random": models.random_drafter,
        "lookup": lambda: "[ngram]",
    }
    if drafter != "none":
        args |= {"speculative_model": str(paths[drafter]()), "num_speculative_tokens": k}
    if drafter == "lookup":
        args["ngram_prompt_lookup_min"] = 1  # random text repeats little more than single tokens
    return make_engine(models.tiny(), **args)


def row_column(engine: LLMEngine, name: str) -> Any:
    """What the runner keeps of every row, a numpy array or a tensor on the card, not a copy."""
    runner: Any = engine.core.runner
    if hasattr(runner, "state"):
        return getattr(runner.state, name)
    state = runner.decode.step.state
    return state.column(name)[: state.max_num_seqs]


def add(
    engine: LLMEngine,
    prompts: Sequence[Any],
    sampling: SamplingParams | Sequence[SamplingParams],
    names: Sequence[str] | None = None,
) -> list[str]:
    """Queue requests; returns their ids."""
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    names = names or [str(i) for i in range(len(prompts))]
    for name, prompt, one in zip(names, prompts, params, strict=True):
        engine.add_request(engine.make_request(name, prompt, one))
    return list(names)


def drain(engine: LLMEngine, limit: int = 20_000) -> dict[str, RequestOutput]:
    """Step until nothing is left, checking every invariant; finished outputs by request id."""
    found: dict[str, RequestOutput] = {}
    scheduler = engine.core.scheduler
    budget = scheduler.config.max_num_batched_tokens
    for _ in range(limit):
        if not engine.core.has_work:
            assert_idle(engine)
            assert not engine.has_unfinished_requests
            return found
        before = engine.stats.num_batched_tokens
        found.update({o.request_id: o for o in engine.step() if o.finished})
        scheduler.check_integrity()
        assert engine.stats.num_batched_tokens - before <= budget
    raise AssertionError("the engine does not come to an end")


def assert_idle(engine: LLMEngine) -> None:
    """No sequence, row or block is left."""
    scheduler = engine.core.scheduler
    assert not scheduler.has_unfinished
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    assert not scheduler.table.occupied.any()


def run(
    engine: LLMEngine,
    prompts: Sequence[Any],
    sampling: SamplingParams | Sequence[SamplingParams],
) -> list[RequestOutput]:
    """All prompts at once, to the end; outputs in their order."""
    names = add(engine, prompts, sampling)
    found = drain(engine)
    return [found[name] for name in names]


def one(engine: LLMEngine, prompt: Sequence[int] = PROMPT, **sampling: Any) -> RequestOutput:
    """A single request, to the end."""
    return run(engine, [list(prompt)], SamplingParams(**sampling))[0]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Token ids of every completion, request by request."""
    return [completion.token_ids for output in outputs for completion in output.outputs]


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Token ids of requests with one output each."""
    assert all(len(output.outputs) == 1 for output in outputs)
    return tokens(outputs)


def text_of_tokens(engine: LLMEngine, output: RequestOutput) -> tuple[str, list[str]]:
    """Text of an output, and what each of its tokens added."""
    assert engine.tokenizer is not None
    ids = output.outputs[0].token_ids
    lengths = [len(engine.tokenizer.decode(ids[:i])) for i in range(len(ids) + 1)]
    text = engine.tokenizer.decode(ids)
    return text, [text[a:b] for a, b in itertools.pairwise(lengths)]


def unique_piece(text: str, pieces: Sequence[str], start: int) -> tuple[int, str]:
    """A token whose text is new, between tokens of ids that occur once; from ``start`` on."""
    for place in range(start, len(pieces) - 4):
        piece = pieces[place]
        if len(piece) > 1 and text.index(piece) == len("".join(pieces[:place])):
            around = pieces[place - 1 : place + 2]
            if all(pieces.index(other) in range(place - 1, place + 2) for other in around):
                return place, piece
    raise AssertionError("take another prompt")


def token_text(engine: LLMEngine, token: int) -> str:
    assert engine.tokenizer is not None
    return engine.tokenizer.decode([token])


class Script:
    """A ``DraftLengthPolicy`` that follows a list of draft lengths, then repeats the last."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = list(lengths)
        self.max_k = max(lengths)
        self.chosen: list[int] = []
        self.outcomes: list[DraftOutcome] = []

    def choose(self, load: Load) -> DraftChoice:
        k = self.lengths.pop(0) if len(self.lengths) > 1 else self.lengths[0]
        self.chosen.append(k)
        return DraftChoice(k, "scripted")

    def observe(self, outcome: DraftOutcome) -> None:
        self.outcomes.append(outcome)
