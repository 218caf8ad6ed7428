"""What ``paceline generate`` writes on standard output: texts, or a JSON object a prompt.

Must not know the engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from paceline.cli.prompts import PromptItem
from paceline.outputs import RequestOutput


class OutputWriter:
    """Writes outputs in the order of their prompts, each as soon as those before it are written.

    count: how many have been written.
    """

    def __init__(self, items: Sequence[PromptItem], *, as_json: bool) -> None:
        self.count = 0
        self._items = items
        self._as_json = as_json
        self._waiting: dict[int, RequestOutput] = {}
        self._next = 0

    def take(self, index: int, output: RequestOutput) -> None:
        """The finished output of prompt ``index``; written now, or after those before it."""
        self._waiting[index] = output
        while self._next in self._waiting:
            self._write(self._next)

    def write_rest(self) -> None:
        """Write all that were taken, though outputs between them are missing."""
        for index in sorted(self._waiting):
            self._write(index)

    def _write(self, index: int) -> None:
        output = self._waiting.pop(index)
        self._next = index + 1
        if self._as_json:
            object_ = _as_json(index, self._items[index], output)
            text = json.dumps(object_, ensure_ascii=False) + "\n"
        else:
            text = _as_text(index, len(self._items), output)
        with tqdm.external_write_mode(sys.stdout):  # lifts a progress bar off the terminal
            self.count += 1  # before, as Ctrl-C may come when the line is just out
            sys.stdout.write(text)
            sys.stdout.flush()


def _as_text(index: int, count: int, output: RequestOutput) -> str:
    lines = []
    for one in output.outputs:
        if count > 1 or len(output.outputs) > 1:
            part = f", output {one.index + 1} of {len(output.outputs)}"
            lines.append(
                f"==> prompt {index + 1} of {count}{part if len(output.outputs) > 1 else ''} <=="
            )
        lines.append(one.text)
    return "\n".join(lines) + "\n"


def _as_json(index: int, item: PromptItem, output: RequestOutput) -> dict[str, Any]:
    drafts = output.metrics.speculative_decoding
    return {
        "index": index,
        "prompt": item.text,
        "messages": item.messages,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
                "cumulative_logprob": one.cumulative_logprob,
                "logprobs": _positions(one.logprobs),
            }
            for one in output.outputs
        ],
        "prompt_logprobs": _positions(output.prompt_logprobs),
        "error": output.error,
        "metrics": {
            "num_cached_tokens": output.metrics.num_cached_tokens,
            "num_preemptions": output.metrics.num_preemptions,
            "num_draft_tokens": drafts.num_draft_tokens,
            "num_accepted_tokens": drafts.num_accepted_tokens,
        },
    }


def _positions(logprobs: Sequence[dict[int, Any] | None] | None) -> list[Any] | None:
    """Logprobs as JSON: a list over positions of objects by token id."""
    if logprobs is None:
        return None
    return [
        None if one is None else {str(token): value._asdict() for token, value in one.items()}
        for one in logprobs
    ]
