"""Acceptance: how many drafts equal what the target samples there anyway.

Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding" (2024). This file must not know how either side came to its tokens.
"""

from __future__ import annotations

import torch


def count_accepted(
    sampled: torch.Tensor, drafts: torch.Tensor, num_draft_tokens: torch.Tensor
) -> torch.Tensor:
    """Number of leading drafts equal to the target's own samples.

    Args:
        sampled: [B, k + 1] the target's sample after the last committed token and after each draft.
        drafts: [B, k] proposed tokens; entries from num_draft_tokens on are padding.
        num_draft_tokens: [B] at most k.

    Returns:
        [B] int64 a. The committed run is ``sampled[b, : a + 1]``: a accepted drafts and one more.
    """
    k = drafts.shape[1]
    proposed = torch.arange(k, device=drafts.device) < num_draft_tokens[:, None]
    matches = (sampled[:, :k] == drafts) & proposed
    return matches.long().cumprod(dim=1).sum(dim=1)
