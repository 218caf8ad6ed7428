"""The engine process: requests come in as messages, steps run, what they added goes out.

Started as ``python -m paceline.server.engine_process INPUTS OUTPUTS`` by ``EngineClient``, with the
addresses of two sockets. Standard input is the leash: when it closes, the client is gone and so is
this process. Knows no HTTP and no text formats.

Nothing that a client of the server sends ends this process. A request that is wrong gets an error
delta; a step that fails ends the requests it held with one, and the engine goes on.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence as List
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
import zmq

from paceline.engine.llm_engine import LLMEngine
from paceline.errors import EngineError, PacelineError, RequestError
from paceline.log import configure_logging
from paceline.outputs import CompletionOutput, Logprob
from paceline.request import Request, Sequence
from paceline.server.memory import give_back_memory
from paceline.server.messages import (
    Abort,
    AddRequest,
    Delta,
    Deltas,
    Fatal,
    FromEngine,
    Ready,
    Shutdown,
    Start,
    Stats,
    Times,
    ToEngine,
    TokenLogprobs,
    decode_for_engine,
    encode,
)

logger = logging.getLogger(__name__)

IDLE_HEARTBEAT_S = 1.0
BUSY_HEARTBEAT_S = 0.5
# Steps that fail one after the other before the engine is given up: a device in an error state
# fails them all.
MAX_FAILED_STEPS = 3
_PREPARING_S = 0.002  # between looks at grammars that are being compiled
_LAST_WORDS_MS = 2000  # how long leaving waits for messages that are not yet sent


class Channel(Protocol):
    """Both directions of the conversation with the API process."""

    def receive(self, timeout: float) -> list[ToEngine]:
        """All messages that are there, after waiting up to ``timeout`` seconds for the first."""

    def send(self, message: FromEngine) -> None: ...


class EngineLoop:
    """Serves one engine until told to stop."""

    def __init__(self, engine: LLMEngine, channel: Channel) -> None:
        self.engine = engine
        self._channel = channel
        self._requests: dict[str, Request] = {}
        # Requests whose grammars are being compiled, in threads; the others go on meanwhile.
        self._preparing: dict[str, tuple[AddRequest, Future[Any]]] = {}
        self._owes_prompt_logprobs: set[str] = set()
        self._failed_steps = 0
        self._last_stats = 0.0
        self._holds_freed_memory = False
        self._stopping = False

    def run(self) -> None:
        """Until ``Shutdown``. Raises EngineError when steps fail one after the other."""
        while not self._stopping:
            busy = self.engine.core.has_work
            for message in self._channel.receive(0.0 if busy else self._patience()):
                self._handle(message)
            self._add_prepared()
            if self.engine.core.has_work:
                self._holds_freed_memory = True
                self._step()
            else:
                self.engine.log_leftovers()
            self._send_stats(went_idle=busy and not self.engine.core.has_work)

    # ---- messages in -----------------------------------------------------------------------------

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._preparing.pop(request_id, None)
                self._drop(request_id)
        elif isinstance(message, Shutdown):
            self._stopping = True

    def _drop(self, request_id: str) -> None:
        """End a request of which nobody wants more; unknown ids are no fault."""
        self._requests.pop(request_id, None)
        self._owes_prompt_logprobs.discard(request_id)
        self.engine.drop_request(request_id)

    def _add_prepared(self) -> None:
        done = [name for name, (_, prepared) in self._preparing.items() if prepared.done()]
        for name in done:
            message, prepared = self._preparing.pop(name)
            self._admit(message, prepared)

    def _add(self, message: AddRequest) -> None:
        prepared = None
        try:
            prepared = self.engine.prepare(message.sampling)
        except Exception:  # making the request will say what is wrong
            logger.debug("request %s could not be prepared", message.request_id, exc_info=True)
        if prepared is not None and not prepared.done():
            self._preparing[message.request_id] = (message, prepared)
        else:
            self._admit(message, prepared)

    def _admit(self, message: AddRequest, prepared: Future[Any] | None) -> None:
        name = message.request_id
        try:
            request = self.engine.make_request(
                name,
                {"prompt_token_ids": message.prompt_token_ids},
                message.sampling,
                stream=message.stream,
                prepared=prepared,
            )
            request.keep_rounds = message.keep_rounds
            self.engine.add_request(request)
        except RequestError as error:
            self._channel.send(Deltas([_error_delta(name, str(error), 400)]))
        except Exception as error:  # a fault of ours, and no reason to end the others
            logger.exception("request %s could not be admitted", name)
            text = f"the engine could not take the request ({type(error).__name__}: {error})"
            self._channel.send(Deltas([_error_delta(name, text, 500)]))
        else:
            self._requests[name] = request
            if message.sampling.prompt_logprobs is not None:
                self._owes_prompt_logprobs.add(name)

    # ---- steps -----------------------------------------------------------------------------------

    def _step(self) -> None:
        try:
            gained = self.engine.step_gained()
        except EngineError as error:
            logger.exception("a step failed")
            self._fail_all(str(error))
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise EngineError(f"{self._failed_steps} steps failed in a row: {error}") from error
            return
        self._failed_steps = 0
        if gained:
            self._channel.send(Deltas([self._delta(*one) for one in gained]))
        for sequence, output in gained:
            if output.finish_reason == "error":  # which ends the request for the client
                self._drop(sequence.request.request_id)

    def _fail_all(self, message: str) -> None:
        """Tell every request that it is lost."""
        deltas = [_error_delta(name, message, 500) for name in self._requests]
        self._requests.clear()
        self._owes_prompt_logprobs.clear()
        self._channel.send(Deltas(deltas))

    def _delta(self, sequence: Sequence, gained: CompletionOutput) -> Delta:
        request = sequence.request
        name = request.request_id
        prompt_logprobs = None
        if sequence.index == 0 and name in self._owes_prompt_logprobs:
            self._owes_prompt_logprobs.discard(name)
            entries = self.engine.prompt_logprobs(request)
            prompt_logprobs = None if entries is None else [_position(entry) for entry in entries]
        if request.finished:
            self._requests.pop(name, None)
        times = None
        if sequence.finished:
            scheduled, first_token = request.first_scheduled_time, request.first_token_time
            times = Times(scheduled, first_token, time.monotonic())
        speculates = self.engine.config.speculative is not None
        grammar, error = sequence.grammar, sequence.error
        asked_for_it = error is not None and grammar is not None and grammar.fault == error
        return Delta(
            request_id=name,
            index=gained.index,
            text=gained.text,
            token_ids=gained.token_ids,
            logprobs=_positions(gained.logprobs),
            finish_reason=gained.finish_reason,
            stop_reason=gained.stop_reason,
            num_prompt_tokens=request.prompt_len,
            num_cached_tokens=request.sequences[0].num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            speculative=sequence.speculative if speculates and sequence.finished else None,
            times=times,
            error=error,
            error_status=400 if asked_for_it else 500,
        )

    # ---- signs of life ---------------------------------------------------------------------------

    def _patience(self) -> float:
        """Seconds to wait for messages while no request runs."""
        if self._preparing:
            return _PREPARING_S
        return max(0.0, self._last_stats + IDLE_HEARTBEAT_S - time.monotonic())

    def _send_stats(self, *, went_idle: bool) -> None:
        """If they are due; also when the last request has ended, so that nobody waits for that."""
        now = time.monotonic()
        if not went_idle and now - self._last_stats < BUSY_HEARTBEAT_S:
            return
        self._last_stats = now
        if self._holds_freed_memory and not (went_idle or self.engine.core.has_work):
            self._holds_freed_memory = False  # idle for a second: nobody waits for this
            give_back_memory()
        scheduler = self.engine.core.scheduler
        stats, pool = scheduler.stats, scheduler.kv.pool
        self._channel.send(
            Stats(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_free_blocks=pool.num_free,
                num_blocks=pool.num_blocks,
                num_steps=stats.num_steps,
                num_prompt_tokens=stats.num_prompt_tokens,
                num_request_prompt_tokens=stats.num_request_prompt_tokens,
                num_generation_tokens=stats.num_generation_tokens,
                num_prefix_queries=stats.num_prefix_queries,
                num_prefix_hits=stats.num_prefix_hits,
                num_preemptions=stats.num_preemptions,
                num_batched_tokens=stats.num_batched_tokens,
                num_drafts=stats.num_drafts,
                num_draft_tokens=stats.num_draft_tokens,
                num_accepted_tokens=stats.num_accepted_tokens,
                proposed_by_position=stats.proposed_by_position.tolist(),
                accepted_by_position=stats.accepted_by_position.tolist(),
                choices=[(k, why, count) for (k, why), count in stats.choices.items()],
            )
        )


def _positions(entries: list[dict[int, Logprob]] | None) -> list[TokenLogprobs] | None:
    return None if entries is None else [_candidates(entry) for entry in entries]


def _position(entry: dict[int, Logprob] | None) -> TokenLogprobs | None:
    return None if entry is None else _candidates(entry)


def _candidates(entry: dict[int, Logprob]) -> TokenLogprobs:
    return TokenLogprobs(
        ids=list(entry),
        logprobs=[one.logprob for one in entry.values()],
        ranks=[one.rank or 0 for one in entry.values()],
        texts=[one.decoded_token or "" for one in entry.values()],
    )


def _error_delta(request_id: str, message: str, status: int) -> Delta:
    return Delta(
        request_id=request_id,
        index=0,
        text="",
        token_ids=[],
        logprobs=None,
        finish_reason="error",
        stop_reason=None,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        prompt_logprobs=None,
        speculative=None,
        times=None,
        # A message may quote half a surrogate pair, which is no UTF-8 and could not be sent.
        error=message.encode(errors="backslashreplace").decode(),
        error_status=status,
    )


# ---- the process ---------------------------------------------------------------------------------


class SocketChannel:
    """A ``Channel`` over two ZeroMQ sockets."""

    def __init__(self, inputs: str, outputs: str) -> None:
        """inputs: address to bind. outputs: address to connect to."""
        self._context = zmq.Context()
        self._inputs = self._context.socket(zmq.PULL)
        self._outputs = self._context.socket(zmq.PUSH)
        for socket in (self._inputs, self._outputs):
            socket.set_hwm(0)  # the API process bounds what is in flight
        self._inputs.bind(inputs)
        self._outputs.connect(outputs)
        self._outputs.linger = _LAST_WORDS_MS

    def receive(self, timeout: float) -> list[ToEngine]:
        self._inputs.poll(int(timeout * 1000))
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._inputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            message = self._decode(data)
            if message is not None:
                messages.append(message)

    def _decode(self, data: bytes) -> ToEngine | None:
        try:
            return decode_for_engine(data)
        except (msgspec.MsgspecError, RequestError) as error:
            # Whoever sent it waits: say so, as far as the message can be read at all.
            kind, name, *_ = msgspec.msgpack.decode(data)
            logger.error("a message of kind %r could not be read: %s", kind, error)
            if kind == "add":
                self.send(Deltas([_error_delta(name, str(error), 400)]))
            return None

    def send(self, message: FromEngine) -> None:
        self._outputs.send(encode(message))

    def close(self) -> None:
        """Wait a moment until everything is sent, then let go."""
        self._inputs.close(linger=0)
        self._outputs.close()
        self._context.term()


def _follow_parent(directory: str) -> None:
    """End this process, whatever it does, once standard input closes.

    directory: of the sockets; the API process removes it unless it was killed.
    """

    def wait() -> None:
        while os.read(0, 4096):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, name="leash", daemon=True).start()


def _first_message(channel: SocketChannel) -> Start:
    while True:
        for message in channel.receive(60.0):
            if isinstance(message, Start):
                return message


def main(argv: List[str]) -> int:
    """Load, serve, leave. Returns the exit status."""
    # The API process decides when to end: it lets requests finish first, while a terminal or a
    # service manager signals every process of the group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _follow_parent(os.path.dirname(argv[0].removeprefix("ipc://")))
    configure_logging()
    channel = SocketChannel(*argv)
    try:
        _serve(channel)
    except PacelineError as error:
        channel.send(Fatal(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        traceback.print_exc()
        channel.send(Fatal("EngineError", f"{type(error).__name__}: {error}"))
        return 1
    finally:
        channel.close()
    return 0


def _serve(channel: SocketChannel) -> None:
    start = _first_message(channel)
    began = time.monotonic()
    engine: Any = LLMEngine(start.config, log_stats=start.log_stats)
    config = engine.config  # with what was measured while loading
    channel.send(
        Ready(
            max_model_len=config.scheduler.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_blocks=config.cache.num_blocks,
            block_size=config.cache.block_size,
            load_seconds=time.monotonic() - began,
        )
    )
    try:
        EngineLoop(engine, channel).run()
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
