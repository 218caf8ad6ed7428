#!/usr/bin/env python3
"""A conversation in the terminal, streamed; end it with Ctrl-D.

python examples/chat.py [MODEL]
"""

from __future__ import annotations

import sys

from paceline import LLM, SamplingParams


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    messages = []
    with LLM(model=model) as llm:
        print("> ", end="", flush=True)
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            ids = llm.get_tokenizer().apply_chat_template(messages)
            answer = ""
            for output in llm.stream({"prompt_token_ids": ids}, SamplingParams(max_tokens=256)):
                text = output.outputs[0].text
                print(text[len(answer) :], end="", flush=True)
                answer = text
            messages.append({"role": "assistant", "content": answer})
            print("\n> ", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
