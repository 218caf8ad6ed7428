"""A conversation as the text a model was trained on, by the model's own chat template.

Templates are Jinja programs that come with the weights, so they run sandboxed: no attribute that
starts with an underscore, no change to what they are given, and they are given plain JSON values.
The helpers and the whitespace rules are those that templates are written for (transformers'). This
file must not know token ids.

    templates = ChatTemplates.load(path, tokenizer_settings, {"bos_token": "<s>"})
    templates.render([{"role": "user", "content": "Hello"}])
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from paceline.errors import ConfigError, RequestError

# Names under which a message may carry the model's reasoning; templates read the first (or the
# second), clients send any.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Stands where the last message ends when the model is to continue it. The space at its end shows
# whether the template trims messages.
_CONTINUE_HERE = "[[the message goes on here]] "
# A template that tells a message without text from others by this must see it as it was sent.
_TESTS_FOR_NONE = re.compile(r"content['\"\]]*\s+is\s+(not\s+)?none")
_OWN_ARGUMENTS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)
_CACHED_OVERRIDES = 8


class ChatTemplates:
    """The named templates of one model, and how to render them.

    templates: template source by name; "default" is the one without a name.
    special_tokens: text by name ("bos_token", ...), variables for the template.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def load(
        cls, path: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> ChatTemplates:
        """Templates of a model directory: separate files come before tokenizer_config.json.

        Raises:
            ConfigError: a template file that cannot be read.
        """
        templates = _templates_in(settings.get("chat_template"))
        try:
            legacy = path / "chat_template.json"
            if not templates and legacy.is_file():
                content = json.loads(legacy.read_text(encoding="utf-8"))
                templates = _templates_in(content.get("chat_template"))
            files = {"default": path / "chat_template.jinja"}
            files |= {
                file.name.removesuffix(".jinja"): file
                for file in sorted((path / "additional_chat_templates").glob("*.jinja"))
            }
            found = {
                name: file.read_text(encoding="utf-8")
                for name, file in files.items()
                if file.is_file()
            }
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the chat template in {path} cannot be read: {error}. hint: fetch it again"
            ) from error
        return cls(found or templates, special_tokens)

    def render(
        self,
        messages: object,
        *,
        chat_template: str | None = None,
        tools: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, special tokens included.

        messages: dicts with "role" and "content", which is text or a list of parts
            {"type": "text", "text": ...}.
        chat_template: another template, or the name of one of the model's.
        tools: JSON schemas of functions that the model may call.
        add_generation_prompt: end with the header of the assistant's answer.
        continue_final_message: leave the last message open, for the model to continue.
        chat_template_kwargs: further variables, such as {"enable_thinking": False}.

        Raises:
            RequestError: malformed messages or tools, no template, or the template's complaint.
        """
        conversation = check_messages(messages)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "`continue_final_message` and `add_generation_prompt` exclude each other: the one "
                "goes on with the last message, the other begins an answer to it. hint: set "
                "`add_generation_prompt=False`"
            )
        final_text = _open_final_message(conversation) if continue_final_message else ""
        variables = {
            **self.special_tokens,
            "documents": None,
            **_check_variables(chat_template_kwargs),
            "messages": conversation,
            "tools": _check_tools(tools),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        source = self.choose(chat_template, has_tools=tools is not None)
        text = self._render(source, variables)
        return _cut_final_message(text, final_text) if continue_final_message else text

    def _render(self, source: str, variables: dict[str, Any]) -> str:
        """Text of a conversation, in which content may be None. Raises RequestError.

        Most templates expect that a message with nothing but tool calls has no content; one that
        cannot do without is given "".
        """
        sent = variables["messages"]
        silent = any(message.get("content") is None for message in sent)
        if not silent or not _TESTS_FOR_NONE.search(source):
            variables |= {"messages": [_without_none(message) for message in sent]}
        try:
            template = self._compile(source)
            try:
                return template.render(variables)
            except (jinja2.UndefinedError, TypeError):
                if not silent:
                    raise
            return template.render(variables | {"messages": [_with_text(one) for one in sent]})
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template has a mistake in line {error.lineno}: "
                f"{error.message}. hint: pass a working one as `chat_template`"
            ) from error
        except jinja2.UndefinedError as error:
            raise RequestError(
                f"the chat template misses something in these messages: {error.message}"
            ) from error
        except jinja2.TemplateError as error:  # what its own raise_exception says
            raise RequestError(
                f"the chat template refuses these messages: {error.message}"
            ) from error
        except Exception as error:  # a template is a program: it may fail in any way
            raise RequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error

    def choose(self, wanted: str | None, *, has_tools: bool) -> str:
        """Source of the template to use. wanted: a template, or the name of one of the model's.

        Raises RequestError if there is none.
        """
        if wanted is not None:
            if not isinstance(wanted, str):
                raise RequestError(
                    f"`chat_template` must be a Jinja template or the name of one, got "
                    f"{type(wanted).__name__}"
                )
            if wanted not in self.templates and not is_template(wanted):
                names = ", ".join(sorted(self.templates)) or "none"
                raise RequestError(
                    f"`chat_template` {wanted!r} is neither a Jinja template nor the name of one "
                    f"of the model's (it has: {names}). hint: pass the template's text"
                )
            return self.templates.get(wanted, wanted)
        if has_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" in self.templates:
            return self.templates["default"]
        if self.templates:
            raise RequestError(
                "the model has several chat templates and no default: "
                f"{', '.join(sorted(self.templates))}. hint: name one as `chat_template`"
            )
        raise RequestError(
            "the model has no chat template (it may be a base model). hint: pass one as "
            "`chat_template`, use an instruction-tuned model, or write the prompt yourself and "
            "call `generate`"
        )

    def _compile(self, source: str) -> jinja2.Template:
        template = self._compiled.get(source)
        if template is None:
            if len(self._compiled) >= len(self.templates) + _CACHED_OVERRIDES:
                self._compiled.clear()
            template = self._compiled[source] = self._environment.from_string(source)
        return template


def is_template(text: str) -> bool:
    """Whether this is a template's text, rather than the name of a template or of a file."""
    return "{{" in text or "{%" in text


def template_mistake(source: str) -> str | None:
    """Where a template is no Jinja and why, as in "in line 3: ..."; None for one that compiles."""
    try:
        _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        return f"in line {error.lineno}: {(error.message or '').rstrip('.')}"
    except (RecursionError, SyntaxError) as error:  # nested deeper than Python can compile
        return f"that keeps it from being compiled: {type(error).__name__}"
    return None


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A deep copy of the conversation as templates expect it.

    Text parts are joined by newlines, entries that are None are left out except for a content,
    arguments of tool calls become objects where a client sent them as JSON text.

    Raises:
        RequestError: not a list of dicts with a role, or content that is not text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"`messages` must be a list of messages, got {type(messages).__name__}. hint: "
            '[{"role": "user", "content": "..."}]'
        )
    if not messages:
        raise RequestError("`messages` is empty. hint: a conversation has at least one message")
    return [_check_message(f"messages[{index}]", entry) for index, entry in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f'{name} must be a dict with "role" and "content", got {type(message).__name__}'
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f'{name} needs a "role" such as "user" or "assistant", got {role!r}')
    result = {
        key: value if key == "content" else _plain(f"{name}.{key}", value)
        for key, value in message.items()
        if value is not None or key == "content"
    }
    if result.get("content") is not None:
        result["content"] = _check_content(f"{name}.content", result["content"])
    for call in _list(result.get("tool_calls")):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _parsed(function["arguments"])
    reasoning = next((result[key] for key in _REASONING if key in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _without_none(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """An answer without text gets an empty one: nobody forgot what it lacks."""
    silent = message["role"] == "assistant" and message.get("content") is None
    return _without_none(message) | ({"content": ""} if silent else {})


def _check_content(name: str, content: object) -> str:
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, list | tuple):
        raise RequestError(
            f'{name} must be text or a list of {{"type": "text", "text": ...}} parts, got '
            f"{type(content).__name__}"
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part, Mapping):
            raise RequestError(
                f"{name}[{index}] is of type {kind!r}, but this engine takes text only. hint: "
                'parts look like {"type": "text", "text": "..."}'
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f'{name}[{index}] needs a "text" string, got {part.get("text")!r}')
        texts.append(part["text"])
    return "\n".join(texts)


def _check_tools(tools: object) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("`tools` must be a list of JSON schemas (dicts)")
    return [_plain(f"tools[{index}]", tool) for index, tool in enumerate(tools)]


def _check_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise RequestError(f"`chat_template_kwargs` must be a dict, got {type(variables).__name__}")
    taken = sorted(_OWN_ARGUMENTS.intersection(variables))
    if taken:
        raise RequestError(
            f"`chat_template_kwargs` may not set `{taken[0]}`. hint: pass it as an argument of its "
            "own"
        )
    return {
        str(key): _plain(f"chat_template_kwargs.{key}", value) for key, value in variables.items()
    }


def _plain(name: str, value: object) -> Any:
    """A copy made of JSON types only: the sandbox cannot judge what methods other objects have."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{index}]", item) for index, item in enumerate(value)]
    raise RequestError(
        f"{name} is a {type(value).__name__}, but chat templates take JSON values only (text, "
        "numbers, booleans, lists, dicts)"
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _parsed(arguments: str) -> Any:
    """Arguments as an object; as they are when a model wrote no valid JSON."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _templates_in(value: object) -> dict[str, str]:
    """Templates by name, from text, a list of {"name", "template"}, or a dict."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        entries = [entry for entry in _list(value) if isinstance(entry, Mapping)]
        pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    return {
        name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)
    }


def _open_final_message(conversation: list[dict[str, Any]]) -> str:
    """Mark where the last message ends; returns its text."""
    text = conversation[-1].get("content")
    if not isinstance(text, str):
        raise RequestError(
            "`continue_final_message` is set, but the last message has no text to continue"
        )
    conversation[-1]["content"] = text + _CONTINUE_HERE
    return text


def _cut_final_message(rendered: str, final_text: str) -> str:
    """What was rendered up to the mark."""
    end = rendered.rfind(_CONTINUE_HERE.strip())
    if end < 0 or final_text.strip() not in rendered[:end]:
        raise RequestError(
            "`continue_final_message` is set, but the chat template does not write the last "
            "message as it is. hint: end the conversation with a user message and set "
            "`add_generation_prompt=True`"
        )
    prompt = rendered[:end]
    return prompt if rendered.startswith(_CONTINUE_HERE, end) else prompt.rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _SafeNamespace
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training: here it
    only renders what it encloses."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - typed so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_enclosed")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _enclosed(self, caller: Callable[[], str]) -> str:
        return caller()


class _SafeNamespace(Namespace):
    """``namespace()`` without names that Python gives a meaning of its own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name a variable "self"
        self, *rest = args
        values = dict(*rest, **kwargs)
        Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace variable must not start with an underscore: {name!r}"
            )
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for web pages, which would change the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
