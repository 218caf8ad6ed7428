"""Rows on the device beside the same rows of the CPU's sampler, which is the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.core.step import NewRow
from paceline.sample.noise import noise_keys
from paceline.sample.rows import SamplingRows
from paceline.sample.sampler import Sampler
from paceline.sampling_params import SamplingParams
from triton_kernels import DEVICE, load

PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": -0.3,
}
FEATURES = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalties": SamplingParams(temperature=0.0, **PENALTIES),
    "sampled": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "top_p": SamplingParams(top_p=0.8),
    "top_k": SamplingParams(top_k=3, temperature=1.5),
    "min_p": SamplingParams(min_p=0.2),
    "bias": SamplingParams(logit_bias={3: 2.0, 200: 1.5, 4: -100, 90: 4.0}),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        min_tokens=6,
        logit_bias={1: 1.0},
        **PENALTIES,
    ),
}


class DeviceBatch:
    """R rows in both forms. Row i holds params[i] and histories[i]; the rest of it are drafts."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        histories: Sequence[np.ndarray],
        prompt_lens: Sequence[int],
        vocab: int,
        stop_token_ids: tuple[int, ...] = (),
        max_k: int = 8,
    ) -> None:
        module = load("paceline.worker.device_rows")
        longest = max(len(h) for h in histories)
        self.device = module.DeviceRows(
            len(params),
            longest + 16,
            block_size=16,
            max_k=max_k,
            device=torch.device(DEVICE),
            max_stop_ids=4,
            max_biases=8,
        )
        if any(p.needs_penalties for p in params):
            self.device.allocate_counts(vocab)
        self.num_tokens = np.array([len(h) for h in histories])
        self.prompt_lens = np.array(prompt_lens)
        self.vocab = vocab
        history = torch.zeros(self.device.history.shape, dtype=torch.int32)
        self.host = SamplingRows(len(params), history, torch.device("cpu"))
        new_rows = []
        for row, sampling in enumerate(params):
            tokens = np.asarray(histories[row], np.int32)
            history[row, : len(tokens)] = torch.from_numpy(tokens)
            self.host.set_row(row, sampling, prompt_lens[row], 100 + row, row, stop_token_ids)
            total = longest + 16
            new_rows.append(
                NewRow(
                    row,
                    1,
                    tokens,
                    prompt_lens[row],
                    total,
                    sampling,
                    stop_token_ids,
                    100 + row,
                    row,
                    [1],
                )
            )
        self.device.enter(new_rows)

    def write_drafts(self, drafts: np.ndarray) -> None:
        """drafts [R, k] behind the committed tokens of both forms."""
        for row, count in enumerate(self.num_tokens.tolist()):
            values = torch.from_numpy(np.asarray(drafts[row], np.int32))
            self.host.history[row, count : count + len(values)] = values
            self.device.history[row, count : count + len(values)] = values.to(DEVICE)

    def positions(self, rows: np.ndarray, query_len: int, offset: int) -> np.ndarray:
        """[B * query_len] positions of what is sampled."""
        start = self.num_tokens[rows] + offset + 1
        return (start[:, None] + np.arange(query_len)).ravel()

    def sample(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        *,
        query_len: int = 1,
        offset: int = -1,
        limit: int | None = None,
        truncation: bool = True,
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and status by the kernels."""
        entries = len(rows) * query_len
        sampler = load("paceline.sample.triton").DeviceSampler(
            entries, self.vocab, torch.device(DEVICE), vocab_limit=limit, truncation=truncation
        )
        out = torch.full((entries,), -7, dtype=torch.int32, device=DEVICE)
        status = torch.full((entries,), -7, dtype=torch.int32, device=DEVICE)
        sampler.sample(
            logits.to(DEVICE),
            torch.from_numpy(rows.astype(np.int32)).to(DEVICE),
            self.device,
            query_len=query_len,
            offset=offset,
            out=out,
            status=status,
            **arguments,
        )
        return out.cpu().long(), status.cpu()

    def oracle(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        *,
        query_len: int = 1,
        offset: int = -1,
        limit: int | None = None,
        truncation: bool = True,
    ) -> torch.Tensor:
        """The same ids by the CPU's sampler."""
        return Sampler(vocab_limit=limit, prune=False).sample(
            logits.clone(),
            np.repeat(rows, query_len),
            self.positions(rows, query_len, offset),
            self.host,
            truncate=truncation,
        )

    def noise_key(self, row: int, position: int) -> int:
        """The key of the token at an absolute position."""
        at = np.array([position - self.prompt_lens[row]], np.int64)
        return int(noise_keys(self.host.row_keys[row : row + 1], at)[0])


def random_logits(count: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Normal bulk, the same on every device."""
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def peaked_logits(count: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """A language model's shape: normal bulk and a head of forty likely tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator) * 2.5
    head = torch.randint(vocab, (count, 40), generator=generator)
    return logits.scatter_(1, head, 15 + 7 * torch.rand(count, 40, generator=generator))
