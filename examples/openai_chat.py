#!/usr/bin/env python3
"""A chat completion through the official `openai` package.

paceline serve Qwen/Qwen2.5-0.5B-Instruct
pip install openai
python examples/openai_chat.py [BASE_URL]
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Name three riders of a paceline."}],
            temperature=0.7,
            seed=1,
            max_completion_tokens=64,
            extra_body={"top_k": 40},  # what OpenAI's API has no name for
        )
        print(answer.choices[0].message.content)
        print(answer.usage)


if __name__ == "__main__":
    main(*sys.argv[1:])
