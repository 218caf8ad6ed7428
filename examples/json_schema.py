#!/usr/bin/env python3
"""An answer as an object of a Pydantic class: the text always matches its JSON schema.

paceline serve Qwen/Qwen2.5-0.5B-Instruct
pip install openai
python examples/json_schema.py [BASE_URL]
"""

from __future__ import annotations

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Ride(BaseModel):
    surface: Literal["road", "gravel", "track"]
    length: Literal["short", "medium", "long"]
    hilly: bool


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        answer = client.chat.completions.parse(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Plan a bicycle ride around Lake Constance."}],
            response_format=Ride,
            temperature=0,
            max_completion_tokens=100,
        )
        print(answer.choices[0].message.parsed)


if __name__ == "__main__":
    main(*sys.argv[1:])
