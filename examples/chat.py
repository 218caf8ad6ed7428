#!/usr/bin/env python3
"""A conversation in the terminal, streamed; end it with Ctrl-D.

python examples/chat.py [MODEL]
"""

import logging
import sys

from paceline import LLM, RequestError, SamplingParams


def reply(llm: LLM, messages: list[dict[str, str]]) -> None:
    ids = llm.get_tokenizer().apply_chat_template(messages)
    answer = ""
    for output in llm.stream({"prompt_token_ids": ids}, SamplingParams(max_tokens=256)):
        text = output.outputs[0].text
        print(text[len(answer) :], end="", flush=True)
        answer = text
    messages.append({"role": "assistant", "content": answer})


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    logging.basicConfig(level=logging.WARNING)  # no log lines between the turns
    messages: list[dict[str, str]] = []
    with LLM(model=model) as llm:
        print("> ", end="", flush=True)
        for line in filter(str.strip, sys.stdin):
            messages.append({"role": "user", "content": line.strip()})
            try:
                reply(llm, messages)
            except RequestError as error:  # such as a conversation longer than the context
                print(f"[{error}]\n[what was said so far is forgotten]", end="")
                messages.clear()
            print("\n> ", end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
