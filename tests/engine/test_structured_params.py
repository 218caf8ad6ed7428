"""``StructuredOutputsParams``: what it takes and refuses, and how sampling parameters hold it."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.sampling_params import SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"regex": 3}, "`regex` must be a string, got int"),
        ({"grammar": ["a"]}, "`grammar` must be a string, got list"),
        ({"choice": "yes"}, "`choice` must be a list of strings"),
        ({"choice": []}, "`choice` is empty"),
        ({"choice": ["a", 3]}, "`choice` must hold strings, got 3"),
        ({"json": 3}, "`json` must be a JSON schema, as a dict or as text, got int"),
        ({"json": StructuredOutputsParams}, "model_json_schema"),
        ({"json": {"default": float("nan")}}, "cannot be written as JSON"),
        ({"json_object": 1}, "`json_object` must be True or False"),
        ({"regex": "a", "disable_any_whitespace": True}, "concerns JSON only"),
        ({"structural_tag": "x"}, "`structural_tag='x'` is not supported"),
        ({"regexp": "x"}, "unknown structured output parameter `regexp`. hint: did you mean `reg"),
    ],
)
def test_what_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**given)
    assert says in str(caught.value)


def test_a_schema_is_kept_as_text() -> None:
    schema = {"type": "string", "description": "é"}
    params = StructuredOutputsParams(json=schema)
    assert isinstance(params.json, str)
    assert json.loads(params.json) == schema
    assert params == StructuredOutputsParams(json=params.json)
    assert params.kind == "json"
    assert StructuredOutputsParams(json_object=True, regex=None).kind == "json_object"
    assert StructuredOutputsParams(regex="", json_object=False).kind == "regex"


def test_sampling_parameters_take_it_or_a_dict() -> None:
    params = StructuredOutputsParams(choice=["a", "b"])
    sampling = SamplingParams(structured_outputs=params)
    as_dict: Any = {"choice": ["a", "b"]}
    assert SamplingParams(structured_outputs=as_dict) == sampling
    assert pickle.loads(pickle.dumps(sampling)) == sampling
    copied = sampling.clone()
    assert copied.structured_outputs is not params
    wrong: Any = "json"
    with pytest.raises(RequestError, match="must be a StructuredOutputsParams, got str"):
        SamplingParams(structured_outputs=wrong)
    wrong = {"json": 3}
    with pytest.raises(RequestError, match="JSON schema"):
        SamplingParams(structured_outputs=wrong)


def test_a_field_assigned_later_is_checked_with_the_rest() -> None:
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert sampling.structured_outputs is not None
    sampling.structured_outputs.choice = ["b"]
    with pytest.raises(RequestError, match="got regex and choice"):
        sampling.validate()
