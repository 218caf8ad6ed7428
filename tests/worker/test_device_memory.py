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
        # A graph of a size that had not come up may take some; nothing else may.
        steady = [(a, b) for a, b in itertools.pairwise(found) if b[0] == a[0]]
        assert len(steady) >= 3
        assert all(b[1] <= a[1] for a, b in steady)
        assert found[-1][2] <= found[6][2] + (64 << 20)


def test_a_measured_pool_serves(tmp_path: Path) -> None:
    """What measuring ran over other KV tensors leaves nothing behind that later passes use."""
    target = str(write_tiny_model(tmp_path / "target"))
    draft = str(write_tiny_model(tmp_path / "draft", perturb=0.05))
    free, total = torch.cuda.mem_get_info()

    def tokens(**memory: float) -> list[list[int]]:
        with LLM(
            target,
            device="cuda",
            dtype="float32",
            speculative_model=draft,
            num_speculative_tokens=2,
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=64,  # short enough for a prefill graph
            disable_log_stats=True,
            **memory,  # type: ignore[arg-type]
        ) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            outputs = llm.generate([[5 + i] * 30 for i in range(4)], greedy, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    share = round(1 - free / total + 0.1, 2)
    assert tokens(gpu_memory_utilization=share) == tokens(kv_cache_memory_bytes=1 << 24)
