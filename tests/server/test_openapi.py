"""Schemathesis against the server's own description: wrong and right requests made from it.

Whatever comes, the answer must be a documented one, and never a fault of the server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from paceline.server.app import make_app
from server.serving import MODEL, RunningServer, StubClient, stub_api

# For longer runs than the test suite's: PACELINE_OPENAPI_EXAMPLES=2000.
EXAMPLES = int(os.environ.get("PACELINE_OPENAPI_EXAMPLES", "25"))
SMALL, VOCABULARY = 8, 4096
COUNTS = ("max_tokens", "max_completion_tokens", "n", "best_of", "top_logprobs", "logprobs")
ROLES = ("system", "developer", "user", "assistant", "tool")
CHECKS = [
    not_a_server_error,
    allow_header_conformance,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with RunningServer(enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
            yield server


def cases() -> list[Any]:
    """Every method of every path that is described, used rightly and, where it can be, wrongly."""
    schema = schemathesis.openapi.from_dict(make_app(stub_api(StubClient())).openapi())
    found = [operation.ok() for operation in schema.get_all_operations()]
    return [
        pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
        for operation in found
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or operation.body
    ]


def repair(body: dict[str, Any], *, generates: bool) -> None:
    """Change what would end most bodies at the door, so that what lies behind it is reached too.

    A description cannot tell everything: which models there are, how many tokens one knows.
    """
    if generates:
        body.setdefault("max_tokens", SMALL)
    if "model" in body:
        body["model"] = MODEL
    if "messages" in body:
        body["messages"] = [known_message(one) for one in body["messages"] or [{}]]
    if "prompt" in body:
        body["prompt"] = known_ids(body["prompt"]) or "a"
    if "tokens" in body:
        body["tokens"] = known_ids(body["tokens"])
    if body.get("stream_options") is not None:
        body["stream"] = True
    for name, value in body.items():
        if name in COUNTS and type(value) is int:
            body[name] = 1 + value % SMALL
        elif isinstance(value, float):
            body[name] = min(max(value, 0.1), 1.0)


def known_message(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    return {"content": "a", **message, "role": role if role in ROLES else "user"}


def known_ids(value: Any) -> Any:
    """The same with every number a token id that the model has."""
    if isinstance(value, list):
        return [known_ids(one) for one in value]
    return value % VOCABULARY if type(value) is int else value


@pytest.mark.parametrize(("operation", "mode"), cases())
def test_answers_are_documented_and_no_faults(
    operation: Any, mode: GenerationMode, server: RunningServer
) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(mode))
    def try_one(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            repair(case.body, generates=case.path.endswith("completions"))
        case.call_and_validate(server.url, checks=CHECKS, timeout=60)

    try_one()
