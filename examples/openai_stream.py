#!/usr/bin/env python3
"""A streamed chat completion, with the number of tokens at its end.

paceline serve Qwen/Qwen2.5-0.5B-Instruct
pip install openai
python examples/openai_stream.py [BASE_URL]
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Write a haiku about the wind."}],
            max_completion_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n{chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
