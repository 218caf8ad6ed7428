"""Text of one sequence, and where a stop string ends it.

One object decodes each id once, for the text and for the search. It is the ``StopChecker`` that
the core knows (``feed`` and ``stop_reason``), and what the engine asks for text. The cut is exact
to the token whatever runs the ids come in: the first id after which the text holds a stop string is
the last one kept. This file must not know the scheduler, models or probabilities.

    text = SequenceText(tokenizer, stop=["\\n\\n"])
    kept = text.feed([12, 345, 6])      # None, or how many of the ids stay
    text.next_delta()                   # what a stream may send now
    text.finish(); text.text
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.detokenizer import IncrementalDetokenizer
from paceline.engine.tokenizer import Tokenizer
from paceline.sampling_params import SamplingParams

# Ids of the prompt's end that decide how the output's first token is spelt.
PROMPT_TAIL = 8


class StopStrings:
    """Search for the first of several strings in a growing text."""

    __slots__ = ("longest", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.longest = max(map(len, self.strings), default=0)

    def find(self, text: str, begin: int = 0) -> tuple[int, str] | None:
        """Start and string of the match that begins first, at or after ``begin``; of equals, the
        earlier in the list."""
        best: tuple[int, str] | None = None
        for string in self.strings:
            start = text.find(string, begin)
            if start >= 0 and (best is None or start < best[0]):
                best = (start, string)
        return best

    def unfinished(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string could begin with."""
        best = len(text)
        for string in self.strings:
            start = text.find(string[0], max(0, len(text) - len(string) + 1))
            while 0 <= start < best:
                if string.startswith(text[start:]):
                    best = start
                else:
                    start = text.find(string[0], start + 1)
        return len(text) - best


class SequenceText:
    """Detokenised text of one sequence, cut at its first stop string.

    prompt_token_ids: the prompt, for the spelling of the first token (see IncrementalDetokenizer).
    min_tokens: text of that many first output tokens is not searched.

    A stop *token* is the caller's business: leave it out of ``feed`` when its text is not wanted.
    """

    __slots__ = (
        "_detokenizer",
        "_floor",
        "_fresh",
        "_given",
        "_include_stop",
        "_length",
        "_stops",
        "_tail",
        "_unsearched",
        "finished",
        "stop_reason",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens, prompt_token_ids[-PROMPT_TAIL:]
        )
        self._stops = StopStrings(stop)
        self._include_stop = include_stop_str_in_output
        self._unsearched = min_tokens if stop else 0  # ids still to come that are not searched
        self._given: list[str] = []  # text that next_delta has returned
        self._fresh: list[str] = []  # text that it has not
        self._length = 0  # characters in both
        self._floor = 0  # a stop string may begin from here on
        self._tail = ""  # end of the text, in which a stop string may have begun
        self.finished = False
        self.stop_reason: str | None = None

    @classmethod
    def for_request(
        cls, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> SequenceText:
        """As the request's sampling parameters ask."""
        return cls(
            tokenizer,
            prompt_token_ids=prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop_strings,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )

    def feed(self, token_ids: Sequence[int]) -> int | None:
        """Take the next output ids.

        Returns None when all are kept, else how many are: the last of them completed a stop string,
        ``stop_reason`` names it, and the sequence is finished.
        """
        if self.finished:
            return 0
        if not self._stops.strings:
            self._append(self._detokenizer.push(token_ids))
            return None
        skipped = min(self._unsearched, len(token_ids))
        if skipped:
            self._unsearched -= skipped
            self._append(self._detokenizer.push(token_ids[:skipped]))
            self._floor = self._length + len(self._detokenizer.held_text)
            token_ids = token_ids[skipped:]
        kept = self._search(token_ids) if len(token_ids) else None
        return None if kept is None else skipped + kept

    def finish(self) -> None:
        """No more ids: an unfinished character becomes U+FFFD, and nothing is held back."""
        if not self.finished:
            self._append(self._detokenizer.flush())
            self.finished = True

    @property
    def text(self) -> str:
        """All text so far; without the stop string unless it was asked for."""
        self._given, self._fresh = ["".join(self._given)], ["".join(self._fresh)]
        return self._given[0] + self._fresh[0]

    @property
    def stable_text(self) -> str:
        """``text`` without an end that may turn out to begin a stop string: what a stream may show.
        It only grows, and equals ``text`` once finished."""
        text = self.text
        return text[: len(text) - self._held_back()]

    def next_delta(self) -> str:
        """What ``stable_text`` has gained since the last call."""
        fresh = "".join(self._fresh)
        end = len(fresh) - self._held_back()
        self._given.append(fresh[:end])
        self._fresh = [fresh[end:]]
        return fresh[:end]

    def _held_back(self) -> int:
        if self.finished or self._include_stop:
            return 0
        return self._stops.unfinished(self._tail)

    def _append(self, delta: str) -> None:
        if delta:
            self._fresh.append(delta)
            self._length += len(delta)
            if self._stops.longest > 1:
                self._tail = (self._tail + delta)[1 - self._stops.longest :]

    def _find(self, delta: str) -> tuple[int, str] | None:
        """First match in the tail and ``delta``; its start counts from the tail's."""
        window = self._tail + delta
        return self._stops.find(window, max(0, self._floor - self._length + len(self._tail)))

    def _search(self, token_ids: Sequence[int]) -> int | None:
        """How many ids stay when a stop string completes in them; None when none does."""
        if not self._detokenizer.holds_whole_characters:
            # Text only grows, so one look at all of the run's text tells whether to look closer.
            ahead = self._detokenizer.copy()
            delta = ahead.push(token_ids)
            if self._find(delta) is None:
                self._detokenizer = ahead
                self._append(delta)
                return None
        for count, token_id in enumerate(token_ids, 1):
            delta = self._detokenizer.push((token_id,))
            whole = delta + self._detokenizer.held_text
            match = self._find(whole)
            if match is not None:
                self._cut(match[0], match[1], whole)
                return count
            self._append(delta)
        return None

    def _cut(self, start: int, string: str, whole: str) -> None:
        """End the text at a match that starts ``start`` characters into the tail."""
        end = self._length - len(self._tail) + start
        if self._include_stop:
            end += len(string)
        given = "".join(self._given)
        fresh = "".join(self._fresh) + whole
        self._given, self._fresh = [given], [fresh[: end - len(given)]]
        self._length = end
        self._tail = ""
        self.finished = True
        self.stop_reason = string
