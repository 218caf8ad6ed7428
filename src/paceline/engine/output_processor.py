"""From committed sequences to ``RequestOutput``: text, logprobs, metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.arrays import TokenLogprobs
from paceline.engine.stop_checker import SequenceText
from paceline.engine.tokenizer import Tokenizer
from paceline.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculativeMetrics,
)
from paceline.request import Request, Sequence


@dataclass(slots=True)
class _Text:
    """Text of one sequence and the ids it was made of."""

    text: SequenceText | None
    token_ids: list[int] = field(default_factory=list)  # reported so far, while it streams
    num_gained: int = 0  # of these, returned by ``gained``
    num_logprobs: int = 0  # parts of the sequence's logprobs returned by ``gained``


class OutputProcessor:
    """Keeps the text of unfinished requests; one instance an engine."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[Sequence, _Text] = {}

    def add(self, request: Request) -> None:
        """Prepare a request's sequences; those with stop strings get their checker here."""
        for sequence in request.sequences:
            text = None
            if self._tokenizer is not None:
                ids = request.prompt_token_ids.tolist()
                text = SequenceText.for_request(self._tokenizer, request.sampling, ids)
                if request.sampling.stop:
                    sequence.stop_checker = text
            self._texts[sequence] = _Text(text)

    def extend(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Take a streaming sequence's newly committed ids."""
        kept = self._texts.get(sequence)
        if kept is None:
            return
        kept.token_ids += token_ids
        if kept.text is not None and sequence.stop_checker is None:
            kept.text.feed(self._without_stop_id(sequence, token_ids))

    def finish(self, sequence: Sequence) -> None:
        """A sequence ended: decode what has not been decoded."""
        kept = self._texts[sequence]
        ids = sequence.output_token_ids
        if kept.text is not None:
            if sequence.stop_checker is None:
                kept.text.feed(self._without_stop_id(sequence, ids)[len(kept.token_ids) :])
            elif self._keeps_stop_id(sequence):
                kept.text.feed(ids[-1:])
            kept.text.finish()
        kept.token_ids = ids

    @staticmethod
    def _ended_by_id(sequence: Sequence) -> bool:
        return sequence.finish_reason == "stop" and not isinstance(sequence.stop_reason, str)

    def _keeps_stop_id(self, sequence: Sequence) -> bool:
        wanted = sequence.request.sampling.include_stop_str_in_output
        return wanted and self._ended_by_id(sequence)

    def _without_stop_id(self, sequence: Sequence, ids: list[int]) -> list[int]:
        """A stop id is part of the output's ids, its text only on request."""
        dropped = self._ended_by_id(sequence) and not self._keeps_stop_id(sequence)
        return ids[:-1] if dropped else ids

    def output(self, request: Request) -> RequestOutput:
        """The request as it stands; a finished one is forgotten."""
        result = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            outputs=[self._completion(sequence) for sequence in request.sequences],
            finished=request.finished,
            metrics=_metrics(request),
            prompt_logprobs=self.prompt_logprobs(request),
            error=next((s.error for s in request.sequences if s.error is not None), None),
        )
        if request.finished:
            self.forget(request)
        return result

    def gained(self, sequence: Sequence) -> CompletionOutput:
        """What one sequence has gained since the last call, instead of all of it.

        For callers who send every token on once: its cost does not grow with the output. An ended
        sequence is forgotten, so a request is read either so or by ``output``.
        """
        kept = self._texts[sequence]
        completion = CompletionOutput(
            index=sequence.index,
            text="" if kept.text is None else kept.text.next_delta(),
            token_ids=kept.token_ids[kept.num_gained :],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        kept.num_gained = len(kept.token_ids)
        if sequence.request.sampling.logprobs is not None:
            completion.logprobs = self._entries(sequence.logprobs[kept.num_logprobs :])
            kept.num_logprobs = len(sequence.logprobs)
        if sequence.finished:
            del self._texts[sequence]
        return completion

    def forget(self, request: Request) -> None:
        """Drop a request's texts."""
        for sequence in request.sequences:
            self._texts.pop(sequence, None)

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        kept = self._texts[sequence]
        text = "" if kept.text is None else kept.text.stable_text
        completion = CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=list(kept.token_ids),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        if sequence.request.sampling.logprobs is not None:
            entries = self._entries(sequence.logprobs)
            completion.logprobs = entries
            completion.cumulative_logprob = sum(
                float(part.logprobs[:, 0].sum()) for part in sequence.logprobs
            )
        return completion

    def prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        """One entry a prompt token, the first None; None if they were not asked for."""
        if request.sampling.prompt_logprobs is None:
            return None
        return [None, *self._entries(request.sequences[0].prompt_logprobs)]

    def _entries(self, parts: list[TokenLogprobs]) -> list[dict[int, Logprob]]:
        return [entry for part in parts for entry in self._decode_logprobs(part)]

    def _decode_logprobs(self, part: TokenLogprobs) -> list[dict[int, Logprob]]:
        """One dictionary a position: the chosen token first, then the most probable ones."""
        entries = []
        for ids, values, rank in zip(
            part.ids.tolist(), part.logprobs.tolist(), part.ranks.tolist(), strict=True
        ):
            entry: dict[int, Logprob] = {}
            for place, (token, value) in enumerate(zip(ids, values, strict=True)):
                if token not in entry:
                    text = None if self._tokenizer is None else self._tokenizer.decode_token(token)
                    entry[token] = Logprob(value, place or rank, text)
            entries.append(entry)
        return entries


def _metrics(request: Request) -> RequestMetrics:
    drafts = SpeculativeMetrics()
    for sequence in request.sequences:
        drafts.num_drafts += sequence.speculative.num_drafts
        drafts.num_draft_tokens += sequence.speculative.num_draft_tokens
        drafts.num_accepted_tokens += sequence.speculative.num_accepted_tokens
    return RequestMetrics(
        arrival_time=request.arrival_time,
        first_scheduled_time=request.first_scheduled_time,
        first_token_time=request.first_token_time,
        finished_time=request.finished_time,
        num_cached_tokens=request.sequences[0].num_cached_tokens,
        num_preemptions=sum(sequence.num_preemptions for sequence in request.sequences),
        speculative_decoding=drafts,
    )
