"""A scheduler on the simulated runner, driven by a reproducible crowd of requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from paceline.config import CacheConfig, SchedulerConfig
from paceline.core.scheduler import Scheduler, StepEvents
from paceline.core.simulated import SimulatedRunner
from paceline.engine.core import EngineCore
from paceline.request import Request
from paceline.sampling_params import SamplingParams
from paceline.spec.policy import DraftLengthPolicy, FixedPolicy


@dataclass
class Setup:
    """One engine configuration; defaults make every mechanism run."""

    num_blocks: int = 40
    block_size: int = 4
    max_num_seqs: int = 8
    budget: int = 24
    max_model_len: int = 100
    k: int = 3
    delay: int = 0
    batching: str = "continuous"
    drafter_has_kv: bool = True
    caching: bool = True
    acceptance: float = 0.7
    chunked: bool = True
    drafter_context: int | None = None
    policy: DraftLengthPolicy | None = None
    vocab_size: int = 50
    num_host_blocks: int = 0

    def build(self) -> EngineCore:
        policy = self.policy or FixedPolicy(self.k)
        has_kv = self.drafter_has_kv and policy.max_k > 0
        scheduler = Scheduler(
            SchedulerConfig(
                self.max_num_seqs,
                self.budget,
                self.max_model_len,
                enable_chunked_prefill=self.chunked,
                batching=self.batching,  # type: ignore[arg-type]
            ),
            CacheConfig(
                self.block_size,
                self.num_blocks,
                self.caching,
                num_host_blocks=self.num_host_blocks,
            ),
            policy,
            drafter_has_kv=has_kv,
            drafter_context=self.drafter_context,
        )
        runner = SimulatedRunner(
            self.num_blocks,
            self.block_size,
            num_host_blocks=self.num_host_blocks,
            vocab_size=self.vocab_size,
            acceptance=self.acceptance,
            drafter_has_kv=has_kv,
        )
        return EngineCore(scheduler, runner, delay=self.delay)


@dataclass
class Outcome:
    """What a run left behind."""

    core: EngineCore
    outputs: dict[str, list[list[int]]]
    reasons: dict[str, list[tuple[str | None, int | str | None]]]
    events: list[StepEvents] = field(default_factory=list)


def make_request(name: str, prompt: list[int], **sampling: object) -> Request:
    return Request(name, np.array(prompt, np.int32), SamplingParams(**sampling), 0.0)  # type: ignore[arg-type]


def crowd(seed: int, count: int, *, most_n: int = 1, vocab_size: int = 50) -> list[Request]:
    """Requests with shared prefixes, random lengths and stop ids."""
    rng = random.Random(seed)
    shared = list(range(12))
    requests = []
    for i in range(count):
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 30))]
        stops = [rng.randrange(vocab_size)] if rng.random() < 0.3 else []
        requests.append(
            make_request(
                f"r{i}",
                shared[: rng.randint(1, 12)] + own,
                max_tokens=rng.randint(1, 50),
                n=rng.randint(1, most_n),
                stop_token_ids=stops,
            )
        )
    return requests


def step(core: EngineCore) -> StepEvents:
    """One step with every invariant checked behind it."""
    before = core.scheduler.stats.num_batched_tokens
    events = core.step()
    core.scheduler.check_integrity()
    used = core.scheduler.stats.num_batched_tokens - before
    assert used <= core.scheduler.config.max_num_batched_tokens
    return events


def drain(core: EngineCore, limit: int = 100_000) -> list[StepEvents]:
    events = []
    while core.has_work:
        events.append(step(core))
        assert len(events) < limit, "the engine does not come to an end"
    return events


def run(setup: Setup, requests: list[Request], *, seed: int = 0, abort: float = 0.0) -> Outcome:
    """Feed requests at random times (in order), abort some, run to the end."""
    rng = random.Random(seed)
    core = setup.build()
    todo = list(requests)
    events = []
    while todo or core.has_work:
        while todo and rng.random() < 0.5:
            core.scheduler.add_request(todo.pop(0))
        alive = [r for r in requests if r.number >= 0 and not r.finished]
        if alive and rng.random() < abort:
            core.scheduler.abort(rng.choice(alive))
            core.scheduler.check_integrity()
        events.append(step(core))
    return Outcome(
        core,
        {r.request_id: [s.output_token_ids for s in r.sequences] for r in requests},
        {r.request_id: [(s.finish_reason, s.stop_reason) for s in r.sequences] for r in requests},
        events,
    )
