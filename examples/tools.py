#!/usr/bin/env python3
"""A model that calls a function and answers with what it returned; needs `pip install openai`.

paceline serve Qwen/Qwen2.5-1.5B-Instruct --enable-auto-tool-choice --tool-call-parser hermes
python examples/tools.py [BASE_URL]
"""

import json
import sys
from functools import partial

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def weather(city: str) -> str:
    return json.dumps({"city": city, "sky": "clear", "celsius": 21})


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    messages = [{"role": "user", "content": "What is the weather in Bern?"}]
    with OpenAI(base_url=base_url, api_key="none") as client:
        ask = partial(client.chat.completions.create, model=client.models.list().data[0].id)
        message = ask(messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = weather(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return print(message.content, "\n(no function was called; small models often do not)")
        print(ask(messages=messages, tools=[TOOL]).choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
