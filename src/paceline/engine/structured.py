"""Structured outputs: what a request's text must look like, as masks over token ids.

``StructuredOutputs`` compiles schemas, expressions and grammars with xgrammar, in threads of its
own, and keeps what it compiled. ``SequenceGrammar`` follows one sequence: it is the
``TokenGrammar`` that the core knows. xgrammar is an optional dependency, imported when the first
structure is asked for. This file must not know rows, steps or logits.

    structured = StructuredOutputs(tokenizer, vocab_size=152064, stop_token_ids=[151645])
    structured.prepare(sampling).result()       # RequestError if it cannot be used
    grammars = structured.sequence_grammars(sampling)
"""

from __future__ import annotations

import importlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.arrays import Int32Array
from paceline.engine.json_schema import check_schema
from paceline.engine.regex_check import check_regex, has_long_repeat, with_safe_repeats
from paceline.engine.structured_trial import (
    MASK_SECONDS,
    Budget,
    too_slow,
    try_out,
)
from paceline.engine.structured_vocabulary import Vocabulary, make_vocabulary
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import RequestError
from paceline.sampling_params import SamplingParams, StructuredOutputsParams

MAX_CHARACTERS = 131_072  # of a schema, expression, grammar, or of all choices
MAX_NESTING = 200  # of brackets: parsers of expressions and grammars call themselves
MAX_WHITESPACE = 64  # characters between two parts of JSON: a model can lose itself in them
COMPILE_SECONDS = 30.0
CACHE_BYTES = 512 << 20  # compiled grammars that are kept; a schema takes 20 MiB at 152,000 ids
_COMPILERS_CACHE = 64 << 20  # its own: parts that structures share
_MAX_BYTES = CACHE_BYTES // 4  # of one
_THREADS = 2  # compiling at a time
_MAX_LATE = 4  # compilations that go on although their time is over: they cannot be stopped
_ANYTHING = np.int32(-1)  # a word of a mask that allows all ids
_NAMES = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
    "json_object": "`json_object`",
}

_WRONG_MASK = (
    "the text has left the form that `structured_outputs` asks for, as a mask of the compiler was "
    "wrong. hint: write long repetitions as repetitions of short ones"
)

_Key = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A structure in the form that matchers are made of."""

    grammar: Any  # xgrammar's CompiledGrammar
    new_matcher: Any  # its GrammarMatcher class
    vocabulary: Vocabulary
    num_bytes: int


@dataclass(slots=True)
class _Job:
    """A thread that compiles."""

    holds_slot: bool = False
    is_late: bool = False  # its slot was given to others
    is_over: bool = False


class StructuredOutputs:
    """Compiles what requests ask for; one instance an engine, used from any thread.

    vocab_size: width of the model's logits. stop_token_ids: the model's own, which end a text.
    seconds: how long a compilation may take.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        *,
        seconds: float = COMPILE_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = frozenset(stop_token_ids)
        self._seconds = seconds
        self._lock = threading.Lock()  # of the cache
        self._loading = threading.Lock()
        self._slots = threading.Semaphore(_THREADS)
        self._late = 0  # compilations whose requests were told that they took too long
        self._cache: OrderedDict[_Key, Future[Compiled]] = OrderedDict()
        # xgrammar, its compiler, and the vocabulary it was made for
        self._backend: tuple[Any, Any, Vocabulary] | None = None

    def prepare(self, sampling: SamplingParams) -> Future[Compiled] | None:
        """Start to compile what a request asks for, unless that is done; None if its form is free.

        The future raises RequestError if the structure cannot be used.
        """
        params = sampling.structured_outputs
        if params is None:
            return None
        key = (params.kind, _text_of(params), params.disable_any_whitespace)
        with self._lock:
            future = self._cache.get(key)
            if future is not None:
                self._cache.move_to_end(key)
                return future
            if self._late >= _MAX_LATE:
                raise RequestError(
                    f"{self._late} structured outputs that took more than {self._seconds:g} s are "
                    "still being compiled, and new ones have to wait until one of them is done. "
                    "hint: try again later"
                )
            future = self._cache[key] = Future()
        threading.Thread(
            target=self._run, args=(key, future), name="paceline-grammar", daemon=True
        ).start()
        return future

    def sequence_grammars(
        self, sampling: SamplingParams, prepared: Future[Compiled] | None = None
    ) -> list[SequenceGrammar]:
        """A grammar at its beginning for each of a request's ``n`` sequences, none if its form is
        free; waits until it is compiled.

        prepared: what ``prepare`` returned for it; the cache may have let go of that since.

        Raises:
            RequestError: the structure cannot be used, or nothing could end its text.
        """
        future = prepared or self.prepare(sampling)
        if future is None:
            return []
        compiled = future.result()
        asked = set(sampling.stop_token_ids or ())
        texts = compiled.vocabulary.texts
        ends = self._stop_token_ids | {i for i in asked if not texts[i]}
        if not ends:
            raise RequestError(
                "structured outputs need an end-of-text token, and neither the model nor the "
                "request names one. hint: give a special token in `stop_token_ids`"
            )
        budget = Budget(sampling.n)
        return [
            SequenceGrammar(compiled, ends, asked | ends, sampling.min_tokens, budget)
            for _ in range(sampling.n)
        ]

    # ---- compilation, in its own threads ---------------------------------------------------------

    def _run(self, key: _Key, future: Future[Compiled]) -> None:
        job = _Job()
        timer = threading.Timer(self._seconds, self._give_up, (key, future, job))
        timer.daemon = True
        timer.start()
        outcome: Compiled | RequestError
        try:
            self._slots.acquire()
            job.holds_slot = True
            if future.done():
                return
            outcome = self._compile(key)
        except RequestError as error:
            outcome = error
        except Exception as error:  # xgrammar raises RuntimeError for most, but promises nothing
            outcome = RequestError(
                f"{_NAMES[key[0]]} cannot be used: {_reason(error)}. hint: see docs/structured.md "
                "for what is supported"
            )
        finally:
            timer.cancel()
            self._end(job)
        self._settle(key, future, outcome)

    def _give_up(self, key: _Key, future: Future[Compiled], job: _Job) -> None:
        """Answer for a compilation that goes on: others need not wait for it."""
        late = RequestError(
            f"{_NAMES[key[0]]} was not compiled within {self._seconds:g} s. hint: make it smaller, "
            "with fewer nested repetitions"
        )
        with self._lock:
            if job.holds_slot and not job.is_late and not job.is_over:
                job.is_late = True
                self._late += 1
                self._slots.release()
        self._settle(key, future, late)

    def _end(self, job: _Job) -> None:
        with self._lock:
            job.is_over = True
            if job.is_late:
                self._late -= 1
            elif job.holds_slot:
                self._slots.release()

    def _settle(
        self, key: _Key, future: Future[Compiled], outcome: Compiled | RequestError
    ) -> None:
        with self._lock:
            if future.done():
                return
            if isinstance(outcome, Compiled):
                future.set_result(outcome)
                self._evict()
            else:
                self._cache.pop(key, None)
                future.set_exception(outcome)

    def _evict(self) -> None:
        """Forget what was not asked for longest. Sequences keep what they use."""
        done = {k: f.result().num_bytes for k, f in self._cache.items() if f.done()}
        total = sum(done.values())
        for key, num_bytes in done.items():
            if total <= CACHE_BYTES:
                return
            del self._cache[key]
            total -= num_bytes

    def _compile(self, key: _Key) -> Compiled:
        kind, text, one_line = key
        if len(text) > MAX_CHARACTERS:
            raise RequestError(
                f"{_NAMES[kind]} has {len(text):,} characters, and {MAX_CHARACTERS:,} are allowed. "
                "hint: make it smaller"
            )
        if kind == "json":
            text = check_schema(text)
        elif kind == "regex":
            check_regex(text, _NAMES[kind])
        if kind in ("regex", "grammar"):
            _check_nesting(text, _NAMES[kind])
        if kind == "regex":
            text = with_safe_repeats(text)
        xgrammar, compiler, vocabulary = self._load()
        if kind == "regex":
            grammar = compiler.compile_regex(text)
        elif kind in ("json", "json_object"):
            grammar = compiler.compile_json_schema(
                text, any_whitespace=not one_line, max_whitespace_cnt=MAX_WHITESPACE
            )
        else:
            grammar = (compiler.compile_grammar if "::=" in text else compiler.compile_lark)(text)
        num_bytes = int(grammar.memory_size_bytes)
        if num_bytes > _MAX_BYTES:
            raise RequestError(
                f"{_NAMES[kind]} takes {num_bytes / 2**20:.1f} MiB when compiled, and "
                f"{_MAX_BYTES >> 20} MiB are allowed. hint: make it smaller"
            )
        compiled = Compiled(grammar, xgrammar.GrammarMatcher, vocabulary, num_bytes)
        ends = self._stop_token_ids or {0}
        grammar = SequenceGrammar(compiled, ends, ends, 0, Budget(1))
        compare = kind in ("regex", "grammar", "json") and has_long_repeat(text)
        try_out(grammar, _NAMES[kind], self._vocab_size, ends, compare=compare)
        return compiled

    def _load(self) -> tuple[Any, Any, Vocabulary]:
        """xgrammar, and a compiler for this vocabulary."""
        with self._loading:
            if self._backend is None:
                self._backend = self._import()
            return self._backend

    def _import(self) -> tuple[Any, Any, Vocabulary]:
        try:
            # By name, so that type checks do not need the package.
            xgrammar: Any = importlib.import_module("xgrammar")
        except ImportError as error:
            raise RequestError(
                "structured outputs need the package xgrammar, which is not installed. hint: "
                'run `pip install -c constraints.txt -e ".[serve]"` in your clone of Paceline'
            ) from error
        vocabulary = make_vocabulary(self._tokenizer, self._vocab_size)
        info = xgrammar.TokenizerInfo(
            vocabulary.texts,
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=sorted(self._stop_token_ids),
        )
        compiler = xgrammar.GrammarCompiler(
            info, max_threads=_THREADS, cache_limit_bytes=_COMPILERS_CACHE
        )
        return xgrammar, compiler, vocabulary


class SequenceGrammar:
    """Follows one sequence through its grammar; see ``TokenGrammar`` in ``paceline/request.py``.

    ends: ids that may come once the text is complete, and only then. stops: these, and ids of
    ordinary tokens that end the sequence too. min_tokens: stops are left out of the first masks, as
    long as anything else may come. budget: shared by the request's sequences.
    """

    __slots__ = (
        "_budget",
        "_compiled",
        "_ends",
        "_last",
        "_matcher",
        "_min_tokens",
        "_stops",
        "fault",
        "num_tokens",
    )

    def __init__(
        self,
        compiled: Compiled,
        ends: Iterable[int],
        stops: Iterable[int],
        min_tokens: int,
        budget: Budget,
    ) -> None:
        self._compiled = compiled
        self._budget = budget
        self._ends = frozenset(ends)
        self._stops = np.array(sorted(stops), np.int64)
        self._min_tokens = min_tokens
        self._matcher: Any = None
        self.fault: str | None = None  # see ``TokenGrammar``
        self._last: int | None = None  # the token that came last
        self.num_tokens = 0

    def accept(self, token_ids: Int32Array) -> None:
        """See ``TokenGrammar``."""
        matcher = self._matcher_now()
        start = time.thread_time()
        for token in token_ids.tolist():
            if self.fault is None and not matcher.accept_token(token):
                self.fault = _WRONG_MASK
            self._last = token
        self.num_tokens += len(token_ids)
        self._charge(time.thread_time() - start, len(token_ids))

    def _charge(self, seconds: float, tokens: int) -> None:
        """Count processor time that everybody waited for, and end what takes too much of it."""
        self._budget.charge(seconds, self.num_tokens)
        if self.fault is None and seconds > MASK_SECONDS * max(tokens, 1):
            self.fault = too_slow("the structure", seconds / max(tokens, 1))
        self.fault = self.fault or self._budget.fault

    def fill(self, drafts: Int32Array, words: Int32Array) -> int:
        """See ``TokenGrammar``."""
        self.fault = self.fault or self._budget.fault  # another output may have spent it
        if self.fault is not None:
            return -1
        matcher, count = self._matcher_now(), len(drafts)
        start = time.thread_time()
        if count:
            nodes = np.arange(count + 1, dtype=np.int64)
            following = np.where(nodes < count, nodes + 1, -1)
            tokens = np.concatenate((np.zeros(1, np.int64), drafts.astype(np.int64)))
            matcher.traverse_draft_tree(following, np.full_like(nodes, -1), tokens, words)
        else:
            matcher.fill_next_token_bitmask(words, 0)
        self._charge(time.thread_time() - start, count + 1)
        if self.fault is not None:
            return -1
        return self._judge(drafts, words)

    def takes(self, token_id: int) -> bool:
        """See ``Tried``."""
        matcher = self._matcher_now()
        if not matcher.accept_token(token_id):
            return False
        matcher.rollback(1)
        return True

    def _judge(self, drafts: Int32Array, words: Int32Array) -> int:
        """How many drafts may be verified; completes the masks up to there."""
        last = self._last
        for place, draft in enumerate([*drafts.tolist(), None]):
            mask = words[place]
            self._keep_to_utf8(mask, last)
            if not mask.any():
                return place - 1  # a dead end: the draft before it leads nowhere
            if self.num_tokens + place < self._min_tokens:
                self._forbid_stops(mask)
            if draft is None or not mask[draft // 32] >> (draft % 32) & 1:
                return place
            if draft in self._ends:
                words[place + 1] = _ANYTHING  # what follows an end is cut off
                return place + 1
            last = draft
        raise AssertionError("unreachable: the last place has no draft")

    def _keep_to_utf8(self, mask: Int32Array, last: int | None) -> None:
        """Forbid what would complete no character with the end of the token before."""
        vocabulary = self._compiled.vocabulary
        text = b"" if last is None else vocabulary.texts[last]
        if text and text[-1] in vocabulary.after:
            mask &= vocabulary.after[text[-1]]

    def _forbid_stops(self, mask: Int32Array) -> None:
        without = mask.copy()
        np.bitwise_and.at(without, self._stops // 32, ~(1 << (self._stops % 32)).astype(np.int32))
        if without.any():
            mask[:] = without

    def _matcher_now(self) -> Any:
        if self._matcher is None:
            self._matcher = self._compiled.new_matcher(
                self._compiled.grammar, override_stop_tokens=sorted(self._ends)
            )
        return self._matcher


def _text_of(params: StructuredOutputsParams) -> str:
    """What a structure is compiled from."""
    if params.choice is not None:
        # JSON's way to write a string is EBNF's too.
        return "root ::= " + " | ".join(json.dumps(x, ensure_ascii=False) for x in params.choice)
    if params.json_object is not None:
        return '{"type": "object", "additionalProperties": true}'
    text = params.json or params.regex or params.grammar
    return text if isinstance(text, str) else ""


def _check_nesting(text: str, name: str) -> None:
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_NESTING:
            raise RequestError(
                f"{name} has brackets more than {MAX_NESTING} deep, at character {place + 1}. "
                "hint: make it flatter"
            )


def _reason(error: Exception) -> str:
    """xgrammar's own words without its times, files and condition."""
    words = str(error)
    if isinstance(error, UnicodeDecodeError):  # its words name half a character of the grammar
        words = error.object.decode(errors="replace")
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ", "", words.strip())
    text = re.sub(r"^Check failed: .*? is false: ", "", text).partition("\n")[0]
    return text.rstrip(". \n") or type(error).__name__
