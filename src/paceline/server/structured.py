"""What a body says its answer must look like, as one ``StructuredOutputsParams``.

Knows the names under which clients say it; whether a schema, an expression or a grammar is valid is
found out by the engine, which compiles it.
"""

from __future__ import annotations

from typing import Any

from paceline.errors import RequestError
from paceline.sampling_params import StructuredOutputsParams
from paceline.server.errors import APIError
from paceline.server.protocol import ResponseFormat, SamplingFields
from paceline.server.tools import ToolUse

_FORMATS = ("text", "json_object", "json_schema")
# Where the form is ours to choose: small models write whitespace to the length limit if they may.
_ONE_LINE = {"disable_any_whitespace": True}


def structured_outputs(body: SamplingFields, tools: ToolUse) -> StructuredOutputsParams | None:
    """The form that the text must take, None when it is free. Raises APIError."""
    asked = asked_form(body, tools)
    if asked is None:
        return None
    param, form = asked
    try:
        return StructuredOutputsParams(**form)
    except RequestError as error:
        raise APIError(400, str(error), param=param) from error


def asked_form(body: SamplingFields, tools: ToolUse) -> tuple[str, dict[str, Any]] | None:
    """The field that asks for a form, and the form by its name in ``StructuredOutputsParams``.

    Raises:
        APIError: more than one form is asked for, or one that tools rule out.
    """
    asked = _asked(body)
    if tools.schema is not None:
        asked["tool_choice"] = {"json": tools.schema, **_ONE_LINE}
    if len(asked) > 1:
        names = " and ".join(f"`{name}`" for name in asked)
        raise APIError(
            400, f"{names} exclude each other. hint: give one of them", param=next(iter(asked))
        )
    if not asked:
        return None
    param, form = next(iter(asked.items()))
    if tools.parser is not None:
        raise APIError(
            400,
            f"`{param}` leaves no room for tool calls, but `tool_choice` allows them. hint: leave "
            'out `tools`, set `tool_choice` to "none" or "required", or leave out the format',
            param=param,
        )
    return param, form


def _asked(body: SamplingFields) -> dict[str, dict[str, Any]]:
    """Forms by the field that asks for them."""
    asked: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and (form := _response_format(body.response_format)):
        asked["response_format"] = form
    if body.structured_outputs is not None:
        asked["structured_outputs"] = body.structured_outputs.model_dump(
            by_alias=True, exclude_none=True
        )
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            asked[f"guided_{name}"] = {name: value}
    return asked


def _response_format(given: ResponseFormat) -> dict[str, Any]:
    """OpenAI's form; empty for free text."""
    if given.type not in _FORMATS:
        raise APIError(
            400,
            f"`response_format.type` must be one of {', '.join(_FORMATS)}, got {given.type!r}",
            param="response_format.type",
        )
    if given.type == "text":
        return {}
    if given.type == "json_object":
        return {"json_object": True, **_ONE_LINE}
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise APIError(
            400,
            '`response_format` of type "json_schema" needs `json_schema.schema`',
            param="response_format.json_schema",
        )
    return {"json": given.json_schema.schema_, **_ONE_LINE}
