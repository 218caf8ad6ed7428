"""The same tokens with and without speculation, alone and in company, on the latency path of a GPU.

    python benchmarks/same_text.py [--shape qwen2.5-0.5b] [--layers 6] [--streams 200] [--pair demo]

Seeded streams in bfloat16, every other one at temperature 0, the rest at 1, on a model of that
shape with random weights (so that many logits lie close together and a difference in rounding
shows) and on the demo pair. Every stream is decoded alone without drafts, which is the reference;
then with drafts, and with others beside it, as far as the latency path takes the pass. A prompt is
prefilled in a pass of its own, so that all start from the same KV. Prints how many streams are
equal, token for token, and a JSON line last; exits with 1 unless all are. With ``--latency-path
off`` it shows what other kernels do.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from paceline import LLM, SamplingParams
from paceline.bench.measure import ChosenLength
from paceline.models.weights import expected_weights
from paceline.synth.shapes import SHAPES

MOST = 16  # streams at a time
# Streams at a time, k.
WAYS = [(1, 0), (1, 4), (1, 7), (2, 3), (4, 1), (4, 3), (8, 0), (8, 1), (16, 0)]


def random_pair(shape: str, layers: int, root: Path) -> tuple[str, str]:
    """A target with random weights, and a drafter that is the same with a little noise."""
    described = replace(SHAPES[shape], num_layers=layers)
    generator = torch.Generator("cuda").manual_seed(0)
    paths = root / "target", root / "drafter"
    weights = {}
    for name, size in expected_weights(described.arch()).items():
        values = torch.randn(size, generator=generator, device="cuda") * 0.03
        weights[name] = (values + 1 if name.endswith("norm.weight") else values).bfloat16()
    for path, noise in zip(paths, (0.0, 0.002), strict=True):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(described.config("bfloat16")))
        tensors = {
            name: (w + noise * torch.randn(w.shape, generator=generator, device="cuda"))
            .bfloat16()
            .cpu()
            for name, w in weights.items()
        }
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(paths[0]), str(paths[1])


def open_engine(target: str, drafter: str, policy: ChosenLength, args: argparse.Namespace) -> LLM:
    """One prompt a prefill pass: the token budget holds no second one."""
    length = 2 * args.tokens + 2 * MOST
    return LLM(
        target,
        device="cuda",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        latency_path=args.latency_path,
        speculative_model=drafter,
        num_speculative_tokens=policy.max_k,
        policy=policy,
        max_num_seqs=MOST,
        max_model_len=length,
        max_num_batched_tokens=length,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2 * 10**9,
        disable_log_stats=True,
    )


def compare(name: str, target: str, drafter: str, args: argparse.Namespace) -> dict[str, Any]:
    """Equal streams of every way."""
    policy = ChosenLength(max(k for _, k in WAYS))
    rng = np.random.default_rng(0)
    results: dict[str, Any] = {}
    with open_engine(target, drafter, policy, args) as llm:
        vocab = llm.engine.config.model.arch.vocab_size
        prompts = rng.integers(0, min(vocab, 4000), (args.streams, args.tokens + 2 * MOST)).tolist()
        sampling = [
            SamplingParams(temperature=i % 2, seed=i, max_tokens=args.tokens, ignore_eos=True)
            for i in range(args.streams)
        ]
        reference: list[list[int]] = []
        for count, k in WAYS:
            policy.k = k
            found: list[list[int]] = []
            for at in range(0, args.streams, count):
                part = slice(at, at + count)
                outputs = llm.generate(prompts[part], sampling[part], use_tqdm=False)
                found += [output.outputs[0].token_ids for output in outputs]
            reference = reference or found
            equal = sum(a == b for a, b in zip(found, reference, strict=True))
            way = f"{count} at a time, k = {k}"
            results[way] = equal
            print(f"{name}, {way}: {equal} of {args.streams}", flush=True)
        results["acceptance"] = llm.engine.stats.acceptance_rate
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, default=6, help="of the random model")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--latency-path", default="on", choices=["on", "off"])
    parser.add_argument("--pair", choices=["random", "demo"], help="only this one")
    args = parser.parse_args()
    logging.getLogger("paceline").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as root:
        pairs = {}
        if args.pair != "demo":
            pairs[f"random {args.shape}"] = random_pair(args.shape, args.layers, Path(root))
        if args.pair != "random":
            pairs["demo pair"] = ("paceline/demo", "paceline/demo-draft")
        results = {name: compare(name, *pair, args) for name, pair in pairs.items()}
    counts = [n for found in results.values() for way, n in found.items() if way != "acceptance"]
    print(json.dumps({"benchmark": "same_text", "streams": args.streams, **results}))
    return 0 if all(count == args.streams for count in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
