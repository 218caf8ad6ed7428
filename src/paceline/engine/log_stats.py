"""The log line every few seconds: what the engine did since the last one."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from paceline.core.scheduler import Scheduler

logger = logging.getLogger(__name__)


class StatsLogger:
    """Call ``begin`` when work comes, and ``tick`` after every step and now and then without one.

    Logs every ``interval`` seconds in which a step ran, and nothing for those without.
    """

    def __init__(self, scheduler: Scheduler, interval: float = 5.0) -> None:
        self.scheduler = scheduler
        self.interval = interval
        self._since = time.monotonic()
        self._before = replace(scheduler.stats)

    def begin(self) -> None:
        """Work comes after none: the time without it belongs to no line."""
        now = time.monotonic()
        if now - self._since >= self.interval:
            self._restart(now)

    def tick(self) -> None:
        """Log if it is time."""
        now = time.monotonic()
        if now - self._since < self.interval:
            return
        line = self.line(now - self._since)
        self._restart(now)
        if line is not None:
            logger.info(line)

    def _restart(self, now: float) -> None:
        self._since, self._before = now, replace(self.scheduler.stats)

    def line(self, seconds: float) -> str | None:
        """The line for the last ``seconds``, None if nothing ran."""
        scheduler, before, now = self.scheduler, self._before, self.scheduler.stats
        steps = now.num_steps - before.num_steps
        if steps == 0:
            return None
        prompt = (now.num_prompt_tokens - before.num_prompt_tokens) / seconds
        generated = (now.num_generation_tokens - before.num_generation_tokens) / seconds
        batched = (now.num_batched_tokens - before.num_batched_tokens) / steps
        budget = scheduler.config.max_num_batched_tokens
        text = (
            f"prompt {prompt:.1f} tokens/s, generation {generated:.1f} tokens/s, "
            f"running {scheduler.num_running}, waiting {scheduler.num_waiting}, "
            f"KV use {scheduler.kv.usage:.1%}, batched {batched:.0f} of {budget} tokens a step"
        )
        looked_up = now.num_prefix_queries - before.num_prefix_queries
        if looked_up:
            text += (
                f", prefix hits {(now.num_prefix_hits - before.num_prefix_hits) / looked_up:.1%}"
            )
        preempted = now.num_preemptions - before.num_preemptions
        if preempted:
            text += f", preempted {preempted}"
        proposed = now.num_draft_tokens - before.num_draft_tokens
        if scheduler.policy.max_k:
            accepted = now.num_accepted_tokens - before.num_accepted_tokens
            share = f"{accepted / proposed:.1%}" if proposed else "none proposed"
            text += f", acceptance {share}"
            if now.num_decode_passes > before.num_decode_passes:
                text += f", k {now.last_k} ({now.last_k_reason})"
        return text
