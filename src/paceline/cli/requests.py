"""Prompts as the engine will see them, refused before a model loads where it would refuse them.

Must not load weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline import hub
from paceline.bench.workload import check_request
from paceline.check import run_checks
from paceline.cli.prompts import PromptItem
from paceline.engine_args import EngineArgs
from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.engine.tokenizer import Tokenizer


def check_items(
    engine: Mapping[str, Any], items: Sequence[PromptItem], sampling: Mapping[str, Any]
) -> None:
    """Check an engine's arguments, then every prompt against the engine they would make.

    Raises:
        ConfigError, CapacityError: the engine could not start; all faults.
        RequestError: the first prompt that it could not serve, with file and line.
    """
    report = run_checks(EngineArgs.from_kwargs(**engine))
    report.raise_faults()
    config = report.config
    assert config is not None  # without faults there is one
    tokenizer = None
    if config.tokenizer.path is not None:
        from paceline.engine.tokenizer import Tokenizer  # the tokenizers library

        # Not config.tokenizer.path: for a model on the hub the check's files are gone by now.
        name = engine.get("tokenizer") or engine["model"]
        tokenizer = Tokenizer.load(hub.download(str(name), weights=False))
    defaults = {**config.default_sampling, **sampling}
    for item in items:
        params = item.sampling_with(defaults)
        with item.located():
            check_request(token_ids(item, tokenizer), params, config, tokenizer)


def token_ids(item: PromptItem, tokenizer: Tokenizer | None) -> list[int]:
    """The prompt as ids; a chat goes through the model's template.

    Raises:
        RequestError: a text without a tokenizer, or what the template refuses.
    """
    if item.token_ids is not None:
        return item.token_ids
    if tokenizer is None:
        raise RequestError(
            "the prompts are texts, but skip_tokenizer_init is set. hint: give JSON lines with "
            "`prompt_token_ids`"
        )
    if item.messages is not None:
        ids: list[int] = tokenizer.apply_chat_template(item.messages)
        return ids
    return tokenizer.encode(item.text or "")
