"""What an engine on a card holds does not grow with the requests it has served."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tiny_model import write_tiny_model

from paceline import LLM, SamplingParams
from triton_kernels import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device"),
]


def test_ten_thousand_requests(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target")
    draft = write_tiny_model(tmp_path / "draft", perturb=0.05)
    with LLM(
        str(target),
        device="cuda",
        speculative_model=str(draft),
        num_speculative_tokens=2,
        max_model_len=128,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 24,  # full most of the time
        disable_log_stats=True,
    ) as llm:

        def serve(count: int) -> tuple[int, int, int]:
            prompts = [[3 + i % 50] * (1 + i % 97) for i in range(count)]
            sampling = [
                SamplingParams(
                    temperature=i % 2,
                    max_tokens=1 + i % 5,
                    presence_penalty=0.1 * (i % 3),
                    logprobs=2 if i % 7 == 0 else None,
                )
                for i in range(count)
            ]
            assert len(llm.generate(prompts, sampling, use_tqdm=False)) == count
            torch.cuda.synchronize()
            graphs = len(llm.engine.core.runner.decode.graphs)  # type: ignore[attr-defined]
            return graphs, torch.cuda.memory_allocated(), -torch.cuda.mem_get_info()[0]

        found = [serve(1000) for _ in range(12)]
        # A new graph, of a prefill size that had not come up, may take some; nothing else may.
        grown = [b for a, b in itertools.pairwise(found) if b[0] == a[0] and b[1] > a[1]]
        assert not grown
        assert found[-1][0] - found[1][0] <= 8
        assert found[-1][2] <= found[1][2] + (64 << 20)
