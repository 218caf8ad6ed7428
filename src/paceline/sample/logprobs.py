"""Log-probabilities to report: raw log-softmax, before any processing, as vLLM reports them.

This file must not know rows or sampling parameters.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.arrays import TokenLogprobs

_CHUNK = 1 << 22  # logits at a time: a prompt's [T, V] would be gigabytes


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: int,
    vocab_limit: int | None = None,
) -> TokenLogprobs:
    """Log-probability and rank of one token a position, and the most probable tokens.

    Args:
        logits: [M, V] float32 as the model gave them (``sample`` changes its own); not changed.
        token_ids: [M] the chosen token, or for a prompt the one that follows.
        num_logprobs: how many of the most probable to add; V at most, more is cut to V.
        vocab_limit: ids from here on count as impossible.

    Returns:
        ids and logprobs [M, 1 + N], the most probable in descending order and by id on ties;
        ranks [M] = 1 + number of strictly more probable tokens.
    """
    if vocab_limit is not None:
        logits = logits[:, :vocab_limit]
    vocab = logits.shape[1]
    count = min(num_logprobs, vocab)
    step = max(1, _CHUNK // vocab)
    chosen = token_ids.to(device=logits.device, dtype=torch.int64)
    parts = [
        _chunk_logprobs(logits[start : start + step], chosen[start : start + step], count)
        for start in range(0, logits.shape[0], step)
    ]
    if not parts:
        empty = np.zeros((0, 1 + count), np.float32)
        return TokenLogprobs(empty.astype(np.int32), empty, np.zeros(0, np.int32))
    ids, logprobs, ranks = (
        torch.cat(tensors).cpu().numpy() for tensors in zip(*parts, strict=True)
    )
    return TokenLogprobs(ids.astype(np.int32), logprobs, ranks.astype(np.int32))


def _chunk_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [C, 1 + count], logprobs of the same shape, ranks [C]."""
    value = logits.gather(1, chosen[:, None])
    ranks = (logits > value).sum(1) + 1
    ids = torch.cat((chosen[:, None], _top_ids(logits, count)), dim=1)
    return ids, torch.log_softmax(logits, dim=-1).gather(1, ids), ranks


def _top_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[C, count] ids by descending logit, then by id, which topk does not promise."""
    if not count:
        return torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    values, ids = logits.topk(count, dim=1)
    # At the border topk may have taken any of equal tokens: of these the lowest ids belong in.
    border = values[:, -1:]
    for row in ((logits == border).sum(1) > (values == border).sum(1)).nonzero()[:, 0].tolist():
        at_border = values[row] == border[row]
        lowest = (logits[row] == border[row]).nonzero()[:, 0]
        ids[row, at_border] = lowest[: int(at_border.sum())]
    by_id = ids.argsort(dim=1)
    ids, values = ids.gather(1, by_id), values.gather(1, by_id)
    return ids.gather(1, values.argsort(dim=1, descending=True, stable=True))
