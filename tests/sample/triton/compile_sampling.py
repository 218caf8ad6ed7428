"""Compiles every decision kernel, as its wrapper launches it, for a card that need not be there.

    python compile_sampling.py SM

Prints one JSON line a kernel. How a launch becomes a compilation: ``cross_compile.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parents[2] / "ops" / "triton"))
from cross_compile import OPTIONS, Launch, source_of

from paceline.sample.triton import DeviceSampler, accept_and_advance, count_tokens
from paceline.worker.device_ngram import lookup_drafts
from paceline.worker.device_rows import DeviceRows

META = torch.device("meta")
ROWS, VOCAB = 8, 151936


def integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def launch_all(query_len: int, counts: bool) -> None:
    """Every kernel once, with and without what is optional."""
    rows = DeviceRows(ROWS, 4096, block_size=16, max_k=5, device=META)
    if counts:
        rows.counts = integers(ROWS + 1, VOCAB)
        count_tokens(integers(1), rows)
    entries = ROWS * query_len
    logits = torch.empty(entries, VOCAB, device=META)
    sampler = DeviceSampler(entries, VOCAB, META, truncation=not counts)
    sampler.sample(
        logits,
        integers(ROWS),
        rows,
        query_len=query_len,
        out=integers(entries),
        status=integers(entries),
        allowed=integers(entries, 4748) if counts else None,
        to_history=counts,
    )
    accept_and_advance(
        integers(entries),
        integers(entries),
        integers(ROWS),
        integers(ROWS),
        rows,
        k=query_len - 1,
        out_tokens=integers(ROWS, query_len),
        out_counts=integers(ROWS),
        out_status=integers(ROWS),
    )
    lookup_drafts(
        integers(ROWS), integers(ROWS), integers(ROWS), rows, max_k=5, lookup_max=4, lookup_min=2
    )


def main() -> None:
    sm = int(sys.argv[1])
    launches: list[Launch] = []
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: launches.append(
        (self, args, kwargs)
    )
    launch_all(1, True)
    launch_all(6, False)
    done = set()
    for launch in launches:
        source = source_of(launch)
        options = {name: launch[2][name] for name in OPTIONS if name in launch[2]}
        if source.hash() in done:
            continue
        done.add(source.hash())
        compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
        print(json.dumps({"kernel": launch[0].__name__, "shared": compiled.metadata.shared}))


if __name__ == "__main__":
    main()
