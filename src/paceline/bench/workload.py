"""The requests of a round: token ids and sampling parameters, the same for every variant.

Each request has a seed of its own, so that a variant cannot change what is generated, only how
fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.bench.lengths import Lengths
from paceline.config import EngineConfig
from paceline.errors import RequestError
from paceline.request import derive_seed
from paceline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Workload:
    """One entry a request."""

    prompts: list[list[int]]
    sampling: list[SamplingParams]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


# Prompts are lists of Python integers: this many tokens take about a gigabyte.
_MOST_PROMPT_TOKENS = 30 * 10**6

# Makes the workload for an engine, which has a tokenizer unless it was told to do without.
WorkloadSource = Callable[[EngineConfig, "Tokenizer | None"], Workload]


@dataclass(frozen=True)
class SyntheticRequests:
    """Random prompts, and outputs that end at their length and nowhere else."""

    count: int
    input_len: Lengths
    output_len: Lengths
    seed: int
    sampling: Mapping[str, Any]  # given by the user; the model's defaults hold otherwise

    def __call__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> Workload:
        """Raises RequestError if a request is longer than the engine's max_model_len, or if all
        prompts together are too long to be kept.
        """
        rng = np.random.default_rng(self.seed)
        inputs = self.input_len.draw(rng, self.count).tolist()
        outputs = self.output_len.draw(rng, self.count).tolist()
        limit = config.scheduler.max_model_len
        longest = max(range(self.count), key=lambda i: inputs[i] + outputs[i])
        if inputs[longest] + outputs[longest] > limit:
            raise RequestError(
                f"request {longest + 1} would have {inputs[longest]} prompt and {outputs[longest]} "
                f"output tokens, {inputs[longest] + outputs[longest]} in all, but max_model_len is "
                f"{limit}. hint: choose shorter lengths, or raise max_model_len if the model and "
                "the KV pool allow it"
            )
        if sum(inputs) > _MOST_PROMPT_TOKENS:
            raise RequestError(
                f"the {self.count} prompts of a round would have {sum(inputs)} tokens, and at most "
                f"{_MOST_PROMPT_TOKENS} can be kept. hint: lower --num-requests or --input-len"
            )
        ids = ordinary_ids(config, tokenizer)
        prompts = [ids[rng.integers(len(ids), size=length)].tolist() for length in inputs]
        base = SamplingParams(**{**config.default_sampling, **self.sampling})
        sampling = [dataclasses.replace(base, max_tokens=n, ignore_eos=True) for n in outputs]
        check_request(prompts[0], sampling[0], config, tokenizer)
        return Workload(prompts, seeded(sampling, self.seed))


def ordinary_ids(config: EngineConfig, tokenizer: Tokenizer | None) -> np.ndarray:
    """[M] ids that stand for text: neither special, nor added, nor beyond the embedding."""
    rows = config.model.arch.vocab_size
    if tokenizer is None:
        return np.arange(rows)
    ids = set(tokenizer.backend.get_vocab(with_added_tokens=False).values())
    return np.array(sorted(i for i in ids - tokenizer.added_token_ids if i < rows))


def seeded(sampling: Sequence[SamplingParams], seed: int) -> list[SamplingParams]:
    """The same, each with a seed: what a fresh engine with this ``seed`` would derive."""
    return [
        one if one.seed is not None else dataclasses.replace(one, seed=derive_seed(seed, number))
        for number, one in enumerate(sampling)
    ]


def check_request(
    prompt: list[int],
    sampling: SamplingParams,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
) -> None:
    """Refuse what the engine would refuse later.

    Raises:
        RequestError: wrong ids or sampling parameters, or a prompt that leaves no place for output.
    """
    from paceline.engine.admission import Admission  # the tokenizers library

    Admission(config, tokenizer).make_request("0", prompt, sampling)
    limit = config.scheduler.max_model_len
    if len(prompt) >= limit:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but max_model_len is {limit} and one place is "
            "needed for output. hint: shorten the prompt, or raise max_model_len if the model and "
            "the KV pool allow it"
        )
