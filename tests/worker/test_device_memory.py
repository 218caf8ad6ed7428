"""What an engine on a card holds does not grow with the requests it has served."""

from __future__ import annotations

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

        def serve(count: int) -> tuple[int, int]:
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
            return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

        for _ in range(4):  # every graph and scratch tensor is made
            allocated, free = serve(1000)
        for _ in range(10):
            now_allocated, now_free = serve(1000)
        assert now_allocated <= allocated
        assert now_free >= free - (8 << 20)  # the driver's own
