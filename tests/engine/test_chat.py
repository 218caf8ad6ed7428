from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from text_models import sentencepiece_backend, tiny_model, write_tokenizer

from paceline.engine.chat import ChatTemplates, check_messages
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import ConfigError, RequestError

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "Functions:" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- for call in message.tool_calls %}
            {{- '\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {%- set text = message.content %}
        {%- if message.reasoning_content is string %}
            {%- set text = '<think>' + message.reasoning_content + '</think>' + text %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nYear: " + date_string + "\\n" }}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|eot_id|>" }}
{% for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message['role'] == 'skip' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {% generation %}
    {{- message['content'] | trim + '<|eot_id|>' }}
    {% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
{{- ns.count }}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}
{{ message['content'] + eos_token }}
{% endif %}
{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL}
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "__type": "AddedToken"},
}
USER = {"role": "user", "content": " What is <2 & 'three' \"é\"? 你好\n"}
TALK = [USER, {"role": "assistant", "content": "  Yes, it is.  "}, {"role": "user", "content": "A"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "<up> & é", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    (path / "config.json").write_text('{"model_type": "mistral"}')
    return write_tokenizer(path, sentencepiece_backend(), SETTINGS)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


@pytest.fixture
def ours(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("talk", [[USER], TALK, TALK[:2]])
def test_prompts_equal_transformers(
    ours: Tokenizer, theirs: Any, template: str, prompt: bool, talk: list[dict[str, str]]
) -> None:
    expected = theirs.apply_chat_template(
        talk, chat_template=template, add_generation_prompt=prompt, tokenize=False
    )
    options = {"chat_template": template, "add_generation_prompt": prompt}
    assert ours.apply_chat_template(talk, tokenize=False, **options) == expected
    ids = theirs.apply_chat_template(
        talk, chat_template=template, add_generation_prompt=prompt, return_dict=False
    )
    assert ours.apply_chat_template(talk, **options) == ids


@pytest.mark.parametrize("template", ["llama", "mistral"])
def test_no_second_bos(ours: Tokenizer, template: str) -> None:
    ids = ours.apply_chat_template([USER], chat_template=TEMPLATES[template])
    assert ours.encode("x")[0] == ours.bos_token_id
    assert ids[0] == ours.bos_token_id
    assert ids.count(ours.bos_token_id) == 1


def test_tools_calls_reasoning_and_variables(ours: Tokenizer, theirs: Any) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"q": "<é>"}}}
    talk = [
        {"role": "system", "content": "Short."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "nothing", "tool_call_id": "1"},
        {"role": "assistant", "content": "So.", "reasoning": "hm"},
        {"role": "user", "content": "Go on", "name": None},
    ]
    expected = theirs.apply_chat_template(
        talk,
        chat_template=CHATML,
        tools=[TOOL],
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=False,
    )
    options: dict[str, Any] = {
        "chat_template": CHATML,
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert ours.apply_chat_template(talk, tokenize=False, **options) == expected
    assert '"description": "<up> & é"' in expected
    # Clients send arguments as JSON text; templates want the object.
    as_text = json.loads(json.dumps(talk))
    as_text[2]["tool_calls"][0]["function"]["arguments"] = '{"q": "<é>"}'
    assert ours.apply_chat_template(as_text, tokenize=False, **options) == expected
    as_text[2]["tool_calls"][0]["function"]["arguments"] = "not json"
    assert '"not json"' in ours.apply_chat_template(as_text, tokenize=False, **options)
    assert talk[2]["content"] is None  # the caller's messages are left alone


@pytest.mark.parametrize("message", [{}, {"content": None}], ids=["absent", "null"])
def test_an_answer_of_tool_calls_alone(ours: Tokenizer, message: dict[str, Any]) -> None:
    """What the server answered must be taken back, whatever the template does with content."""

    def rendered(body: str) -> str:
        template = "{% for message in messages %}" + body + ";{% endfor %}"
        answer = {"role": "assistant", **message, "tool_calls": [{"function": {"name": "f"}}]}
        text = ours.apply_chat_template([USER, answer], chat_template=template, tokenize=False)
        assert isinstance(text, str)
        return text.split(";")[1]

    assert rendered("{{ '[' + message['content'] + ']' }}") == "[]"
    assert rendered("{{ message.content }}") == ""
    assert rendered("{{ 'content' in message }}") == "False"
    null = "{{ message['content'] is none }}"
    assert rendered(null) == str(message == {"content": None})
    with pytest.raises(RequestError, match="has no attribute 'content'"):
        ours.apply_chat_template(
            [{"role": "user"}], chat_template="{{ '[' + messages[0].content }}", tokenize=False
        )


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("final", ["Once upon", "  Once upon \n", "Once upon Once upon"])
def test_continuing_the_final_message(
    ours: Tokenizer, theirs: Any, template: str, final: str
) -> None:
    talk = [USER, {"role": "assistant", "content": final}]
    expected = theirs.apply_chat_template(
        talk, chat_template=template, continue_final_message=True, tokenize=False
    )
    text = ours.apply_chat_template(
        talk,
        tokenize=False,
        chat_template=template,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text == expected
    assert text.rstrip().endswith("Once upon")


def test_a_final_message_that_cannot_be_continued(ours: Tokenizer) -> None:
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(RequestError, match="no text to continue"):
        ours.apply_chat_template([{"role": "assistant"}], chat_template=CHATML, **options)
    with pytest.raises(RequestError, match="does not write the last message"):
        ours.apply_chat_template([USER], chat_template="{{ messages[0].role }}", **options)
    with pytest.raises(RequestError, match="exclude each other"):
        ours.apply_chat_template([USER], chat_template=CHATML, continue_final_message=True)


def test_text_parts_are_joined(ours: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    talk = [{"role": "user", "content": parts}]
    text = ours.apply_chat_template(talk, tokenize=False, chat_template=MISTRAL)
    assert text.strip() == "<s>[INST] one\ntwo [/INST]"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("Hello", "`messages` must be a list"),
        ({"role": "user"}, "`messages` must be a list"),
        (None, "`messages` must be a list"),
        ([], "`messages` is empty"),
        (["Hello"], r"messages\[0\] must be a dict"),
        ([USER, {"content": "x"}], r'messages\[1\] needs a "role"'),
        ([{"role": 3, "content": "x"}], 'needs a "role"'),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is of type 'str'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"content\[0\] is of type 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], 'needs a "text" string'),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\]\.extra is a obj"),
    ],
)
def test_malformed_messages(messages: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        check_messages(messages)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tools": "x"}, "`tools` must be a list"),
        ({"tools": ["x"]}, "`tools` must be a list"),
        ({"tools": [{"f": object()}]}, r"tools\[0\]\.f is a object"),
        ({"chat_template_kwargs": {"tools": []}}, "may not set `tools`"),
        ({"chat_template_kwargs": 3}, "must be a dict, got int"),
        ({"chat_template": 3}, "must be a Jinja template"),
        ({"chat_template": "rag"}, r"'rag' is neither .*it has: none"),
        ({"chat_template": "{{ oh no }}"}, "mistake in line 1"),
        ({"chat_template": "{% for %}"}, "mistake in line 1"),
        ({"chat_template": "{{ messages[0].content + 1 }}"}, "TypeError"),
        ({"chat_template": "{{ messages[0].nothing.at_all }}"}, "misses something"),
        ({"chat_template": "{{ raise_exception('No tools, please') }}"}, "No tools, please"),
        ({}, r"has no chat template .*hint: pass one as `chat_template`"),
    ],
)
def test_what_cannot_be_rendered(ours: Tokenizer, options: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        ours.apply_chat_template([USER], **options)


def test_a_template_may_refuse_the_roles(ours: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Roles must alternate user/assistant"):
        ours.apply_chat_template([USER, USER], chat_template=MISTRAL)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages|attr('__class__') }}{{ messages.__class__.__name__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__html__ = raise_exception %}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_templates_run_in_a_sandbox(ours: Tokenizer, attack: str) -> None:
    with pytest.raises(RequestError):
        ours.apply_chat_template([USER], chat_template=attack)


def test_a_namespace_variable_may_be_called_self(ours: Tokenizer) -> None:
    template = "{% set ns = namespace(self=1) %}{% set ns.self = ns.self + 1 %}{{ ns.self }}"
    assert ours.apply_chat_template([USER], tokenize=False, chat_template=template) == "2"


def test_the_date_is_todays(ours: Tokenizer) -> None:
    text = ours.apply_chat_template([USER], tokenize=False, chat_template=LLAMA)
    assert f"Year: {datetime.now().year}" in text


def write(path: Path, settings: dict[str, Any], files: dict[str, str]) -> ChatTemplates:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content, encoding="utf-8")
    return ChatTemplates.load(path, settings, {})


def test_where_templates_are_found(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "{{ 'd' }}"},
        {"name": "tool_use", "template": "{{ 't' }}"},
    ]
    assert write(tmp_path, {}, {}).templates == {}
    assert write(tmp_path, {"chat_template": "{{ 's' }}"}, {}).render([USER]) == "s"
    several = write(tmp_path, {"chat_template": named}, {})
    assert several.render([USER]) == "d"
    assert several.render([USER], tools=[TOOL]) == "t"
    assert several.render([USER], chat_template="tool_use") == "t"
    assert several.render([USER], chat_template="{{ 'own' }}") == "own"
    with pytest.raises(RequestError, match="it has: default, tool_use"):
        several.render([USER], chat_template="tool_us")
    with pytest.raises(RequestError, match="several chat templates and no default: tool_use"):
        write(tmp_path, {"chat_template": named[1:]}, {}).render([USER])
    legacy = {"chat_template.json": json.dumps({"chat_template": "{{ 'j' }}"})}
    assert write(tmp_path, {}, legacy).render([USER]) == "j"
    assert write(tmp_path, {"chat_template": "{{ 's' }}"}, {}).render([USER]) == "s"
    file = {"chat_template.jinja": "{{ 'f' }}", "additional_chat_templates/rag.jinja": "{{ 'r' }}"}
    found = write(tmp_path, {"chat_template": "{{ 's' }}"}, file)
    assert found.render([USER]) == "f"
    assert found.render([USER], chat_template="rag") == "r"


def test_a_template_file_that_cannot_be_read(tmp_path: Path) -> None:
    for content in ("{", "[1]"):
        with pytest.raises(ConfigError, match="cannot be read"):
            write(tmp_path, {}, {"chat_template.json": content})


def test_many_overrides_are_not_kept_for_ever(ours: Tokenizer) -> None:
    for number in range(40):
        template = f"{{{{ {number} }}}}"
        text = ours.apply_chat_template([USER], tokenize=False, chat_template=template)
        assert text == str(number)
    assert len(ours.chat_templates._compiled) < 20


def test_the_tiny_model_has_a_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = tiny_model().write_tiny_model(tmp_path)
    expected = AutoTokenizer.from_pretrained(str(path)).apply_chat_template(
        TALK, add_generation_prompt=True, return_dict=False
    )
    assert Tokenizer.load(path).apply_chat_template(TALK) == expected
