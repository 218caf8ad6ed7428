"""``tools`` and ``tool_choice`` of a body: what the model is shown, and what it must write.

"auto" lets the model decide and a parser read its text; "required" and a named function become a
JSON schema that the text must match. Knows no templates, tokens or grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.server.errors import APIError
from paceline.server.message_parser import MessageForm
from paceline.server.protocol import ChatCompletionRequest, FunctionDefinition, Tool
from paceline.server.tool_parsers import TOOL_PARSERS

_MOST_TOOLS = 1024  # OpenAI takes 128


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses tools.

    offered: for the chat template; None without. schema: what the text must match, if calls are
    forced. parser: who finds calls in the text, if they are not.
    """

    offered: list[dict[str, Any]] | None = None
    schema: dict[str, Any] | None = None
    parser: str | None = None
    called_function: str | None = None
    one_call: bool = False

    def form(self, reasoning: bool | None) -> MessageForm:
        """How the text is read."""
        required = self.schema is not None and self.called_function is None
        return MessageForm(reasoning, self.parser, required, self.called_function, self.one_call)


def tool_use(body: ChatCompletionRequest, parser: str | None) -> ToolUse:
    """What ``body`` asks for; ``parser`` is the server's. Raises APIError."""
    choice = body.tool_choice
    functions = _functions(body)
    if not functions:
        if choice in (None, "auto", "none"):
            return ToolUse()
        raise APIError(
            400, "`tool_choice` asks for a call, but there are no `tools`", param="tool_choice"
        )
    if choice == "none":  # what the model is not shown it cannot call
        return ToolUse()
    offered = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    one_call = body.parallel_tool_calls is False
    if choice in (None, "auto"):
        if parser is None:
            raise APIError(
                400,
                "the server does not know in which form this model calls tools. hint: start it "
                f"with `--tool-call-parser` ({', '.join(TOOL_PARSERS)}), or set `tool_choice` to "
                '"required", a function or "none"',
                param="tool_choice",
            )
        return ToolUse(offered, parser=parser, one_call=one_call)
    if choice == "required":
        return ToolUse(offered, _calls_schema(functions, one_call), one_call=one_call)
    function = functions[_named(choice, functions)]
    schema = _arguments_schema(function)
    return ToolUse(offered, schema, called_function=function.name)


def check_count(tools: Sequence[Tool] | None) -> None:
    """Raise APIError for more tools than may be given."""
    if tools is not None and len(tools) > _MOST_TOOLS:
        raise APIError(
            400,
            f"`tools` has {len(tools)} entries, and at most {_MOST_TOOLS} may be given",
            param="tools",
        )


def _functions(body: ChatCompletionRequest) -> dict[str, FunctionDefinition]:
    functions: dict[str, FunctionDefinition] = {}
    check_count(body.tools)
    for place, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise APIError(
                400,
                f'`tools[{place}].type` must be "function", got {tool.type!r}',
                param=f"tools[{place}].type",
            )
        name = tool.function.name
        if name in functions:
            raise APIError(
                400,
                f"`tools` has two functions named {name!r}. hint: give each its own name",
                param=f"tools[{place}].function.name",
            )
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise APIError(
                400,
                f"the `parameters` of the function {name!r} have the type {kind!r}, but arguments "
                "are an object",
                param=f"tools[{place}].function.parameters",
            )
        functions[name] = tool.function
    return functions


def _named(choice: object, functions: dict[str, FunctionDefinition]) -> str:
    """Name of the function that ``tool_choice`` forces."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if (
        not isinstance(choice, dict)
        or choice.get("type") != "function"
        or not isinstance(name, str)
    ):
        raise APIError(
            400,
            '`tool_choice` must be "auto", "none", "required" or {"type": "function", "function": '
            '{"name": "..."}}',
            param="tool_choice",
        )
    if name not in functions:
        raise APIError(
            400,
            f"`tool_choice` names the function {name!r}, but `tools` has: {', '.join(functions)}",
            param="tool_choice",
        )
    return name


def _arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """What a call's arguments must match. As for OpenAI, a function without any takes none."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}


def _calls_schema(functions: dict[str, FunctionDefinition], one_call: bool) -> dict[str, Any]:
    """A list of calls: at least one, of any of the functions."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for function in functions.values():
        parameters = _arguments_schema(function)
        # References in a schema count from its root, which is another one now.
        for group in ("$defs", "definitions"):
            named = parameters.pop(group, None)
            for name, definition in named.items() if isinstance(named, dict) else ():
                if definitions.setdefault(group, {}).setdefault(name, definition) != definition:
                    raise APIError(
                        400,
                        f"two `tools` define {name!r} in `{group}` differently. hint: rename one",
                        param="tools",
                    )
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [function.name]},
                    "parameters": parameters,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if one_call:
        schema["maxItems"] = 1
    return schema | definitions
