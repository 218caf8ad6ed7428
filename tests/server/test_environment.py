"""Environment variables of a server: keys, and vLLM's that have no effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.cli.serve import _parser
from paceline.server.environment import COUNTERPARTS, environment_keys, ignored_variables

SERVER_PAGE = Path(__file__).resolve().parents[2] / "docs" / "server.md"


@pytest.mark.parametrize(
    ("environment", "keys"),
    [
        ({}, ()),
        ({"PACELINE_API_KEY": "ours"}, ("ours",)),
        ({"VLLM_API_KEY": "theirs"}, ("theirs",)),
        ({"PACELINE_API_KEY": "", "VLLM_API_KEY": "theirs"}, ("theirs",)),
        ({"PACELINE_API_KEY": "ours", "VLLM_API_KEY": "theirs"}, ("ours",)),
        ({"VLLM_API_KEY": ""}, ()),
    ],
)
def test_our_key_comes_before_vllms(environment: dict[str, str], keys: tuple[str, ...]) -> None:
    assert environment_keys(environment) == keys


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PATH": "/bin", "MY_VLLM_THING": "1"},
        {"VLLM_API_KEY": "secret"},
        {"VLLM_LOGGING_LEVEL": ""},
        {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"},
        {  # a Kubernetes service named vllm, and one named vllm-router
            "VLLM_SERVICE_HOST": "10.0.0.1",
            "VLLM_SERVICE_PORT": "80",
            "VLLM_SERVICE_PORT_HTTP": "80",
            "VLLM_PORT": "tcp://10.0.0.1:80",
            "VLLM_PORT_80_TCP": "tcp://10.0.0.1:80",
            "VLLM_PORT_80_TCP_ADDR": "10.0.0.1",
            "VLLM_ROUTER_SERVICE_HOST": "10.0.0.2",
        },
    ],
)
def test_nothing_to_say(environment: dict[str, str]) -> None:
    assert ignored_variables(environment) is None


def test_what_has_no_effect_is_named_without_its_value() -> None:
    message = ignored_variables(
        {
            "VLLM_SOMETHING": "hidden",
            "VLLM_CPU_KVCACHE_SPACE": "hidden",
            "VLLM_API_KEY": "hidden",
            "PACELINE_API_KEY": "hidden",
        }
    )
    assert message == (
        "set in the environment, but without effect here: VLLM_API_KEY (PACELINE_API_KEY comes "
        "before it); VLLM_CPU_KVCACHE_SPACE (use `--kv-cache-memory-bytes`); VLLM_SOMETHING"
    )


def test_the_table_of_the_page_is_current_and_names_real_flags() -> None:
    text = SERVER_PAGE.read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(VLLM_\w+)` \| (.+) \|$", text, re.MULTILINE)) == COUNTERPARTS
    known = {option for action in _parser()._actions for option in action.option_strings}
    named = re.findall(r"`(--[\w-]+)`", " ".join(COUNTERPARTS.values()))
    assert named
    assert set(named) <= known
