"""A server's life: port, engine, application, signals, orderly end.

status = asyncio.run(Serving(args, settings).run())
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from paceline import __version__
from paceline.config import EngineConfig
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import ConfigError, RequestError
from paceline.log import configure_logging
from paceline.server.app import make_app
from paceline.server.chat_template import check_named, read_template
from paceline.server.convert import ServingContext
from paceline.server.engine_client import EngineClient
from paceline.server.environment import environment_keys, start_warnings
from paceline.server.errors import unavailable
from paceline.server.http_protocol import LimitedHttpProtocol
from paceline.server.messages import Ready
from paceline.server.metrics import Metrics
from paceline.server.network import check_tls, listen, tls_files
from paceline.server.observer import Observer
from paceline.server.routes import Api
from paceline.server.settings import ServerSettings
from paceline.server.tool_parsers import TOOL_PARSERS, detect_tool_parser

logger = logging.getLogger(__name__)

_INTERRUPTED = 130
# Beyond the shutdown timeout, for clients that do not read what they are sent.
_LAST_WRITES_S = 5
_SAMPLE_S = 1.0  # between the dashboard's points


class Serving:
    """One server, from its port to its exit status.

    config: of the engine. log_stats: whether the engine logs its line every few seconds.
    handle_signals: False where the caller ends the server, through ``stop``.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerSettings,
        *,
        log_stats: bool = True,
        handle_signals: bool = True,
    ) -> None:
        self._config = config
        self._settings = settings
        self._handle_signals = handle_signals
        self._template = read_template(settings.chat_template)
        check_tls(settings)
        self._http: _HttpServer | None = None
        self._starting: asyncio.Task[Ready] | None = None
        self._num_stops = 0
        self._tool_parser: str | None = None
        self.observer = Observer()
        self.client = EngineClient(
            config, self.observer, restart=settings.restart_engine, log_stats=log_stats
        )
        self.api: Api | None = None
        self.url = ""  # known once it serves

    async def run(self) -> int:
        """Serve until told to stop. Returns the exit status: 0, or 130 if it was told twice.

        Raises ConfigError or CapacityError when it cannot start, the port's problems first.
        """
        for warning in start_warnings(self._settings, os.environ):
            logger.warning("%s", warning)
        with contextlib.closing(listen(self._settings)) as port, self._signals():
            try:
                if await self._start_engine():
                    await self._serve(port)
            finally:
                await self.client.stop(patience=self._num_stops < 2)
        return 0 if self._num_stops < 2 else _INTERRUPTED

    async def _start_engine(self) -> bool:
        """Whether an engine serves, rather than that the server was told to stop."""
        tokenizer = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        self._starting = asyncio.create_task(self.client.start())
        try:
            # Whichever fails first is told: a tokenizer's faults need not wait for weights.
            loaded, ready = await asyncio.gather(tokenizer, self._starting)
            self.api = self._make_api(ready, loaded)
        except asyncio.CancelledError:
            if not self._num_stops:
                raise
            return False
        finally:
            starting, self._starting = self._starting, None
            starting.cancel()
            await asyncio.wait([starting])  # until the process it may have made has ended
        return True

    def _load_tokenizer(self) -> Tokenizer:
        path = self._config.tokenizer.path
        if path is None:
            raise ConfigError(
                "the server needs a tokenizer, but skip_tokenizer_init is set. hint: leave it out"
            )
        tokenizer = Tokenizer.load(path)
        # Read now: a file that cannot be read ends the start.
        check_named(self._template, tokenizer.chat_templates)
        self._tool_parser = find_tool_parser(self._settings, tokenizer, self._template)
        return tokenizer

    def _make_api(self, ready: Ready, tokenizer: Tokenizer) -> Api:
        config, settings = self._config, self._settings
        names = tuple(dict.fromkeys(settings.served_model_name)) or (config.model.name,)
        speculative = config.speculative
        context = ServingContext(
            tokenizer=tokenizer,
            model_name=names[0],
            max_model_len=ready.max_model_len,
            vocab_size=config.model.arch.vocab_size,
            default_sampling=config.default_sampling,
            chat_template=self._template,
            tool_parser=self._tool_parser,
            reasoning_parser=settings.reasoning_parser,
            spec_decode_metrics=settings.per_request_spec_decode_metrics,
            num_speculative_tokens=speculative.num_speculative_tokens if speculative else None,
        )
        budget = config.scheduler.max_num_batched_tokens
        return Api(
            client=self.client,
            context=context,
            settings=settings,
            names=names,
            root=config.model.name,
            observer=self.observer,
            metrics=Metrics(self.observer, names[0], budget),
            about=_about(config, ready),
        )

    async def _serve(self, port: socket.socket) -> None:
        api, settings = self.api, self._settings
        assert api is not None
        keys = settings.api_key + environment_keys(os.environ)
        certificate, key = tls_files(settings) or (None, None)
        _configure_http_logging(settings.access_log)
        http_config = uvicorn.Config(
            make_app(api, keys),
            http=LimitedHttpProtocol,
            ws="none",
            access_log=settings.access_log,
            log_config=None,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=int(settings.shutdown_timeout) + _LAST_WRITES_S,
            ssl_keyfile=key,
            ssl_certfile=certificate,
        )

        def accepting() -> None:
            self.url = _url(settings, port)
            names = ", ".join(api.names)
            logger.info("serving %s at %s/v1 (%s)", names, self.url, _who_may(keys))

        self._http = _HttpServer(http_config, accepting)
        sampling = asyncio.create_task(self._sample())
        try:
            await self._http.serve(sockets=[port])
        finally:
            sampling.cancel()

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            self.observer.sample()

    # ---- the end ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if not self._handle_signals:
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Accept nothing more, let requests finish within the timeout; the second time, end now."""
        self._num_stops += 1
        if self._starting is not None and self._num_stops == 1:
            self._starting.cancel()  # a second time would cut its cleaning up
        if self._http is None:
            return
        if self._num_stops == 1:
            self._drain(self._http)
        else:
            self._end_requests()
            self._http.force_exit = True

    def _drain(self, http: _HttpServer) -> None:
        seconds = self._settings.shutdown_timeout
        if self.api is not None:
            self.api.drain()
        count = self.client.num_in_flight
        if count:
            logger.info(
                "shutting down: %d outputs in flight have %g s to finish; a second signal ends "
                "them",
                count,
                seconds,
            )
        else:
            logger.info("shutting down: nothing is running")
        http.should_exit = True
        asyncio.get_running_loop().call_later(seconds, self._end_requests)

    def _end_requests(self) -> None:
        if self.client.num_in_flight:
            logger.warning("%d outputs in flight are ended", self.client.num_in_flight)
        self.client.fail_all(unavailable("the server is shutting down", "shutting_down"))


class _HttpServer(uvicorn.Server):
    """Signals are the caller's: uvicorn would raise them again at the end, and exit with them.

    accepting: called once connections are accepted.
    """

    def __init__(self, config: uvicorn.Config, accepting: Callable[[], None]) -> None:
        super().__init__(config)
        self._accepting = accepting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._accepting()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _about(config: EngineConfig, ready: Ready) -> dict[str, Any]:
    """The engine in a few words, for the dashboard."""
    speculative = config.speculative
    drafter = None
    if speculative is not None:
        drafter = speculative.method if speculative.model is None else speculative.model.name
    return {
        "version": __version__,
        "model": config.model.name,
        "drafter": drafter,
        "num_speculative_tokens": speculative and speculative.num_speculative_tokens,
        "dtype": config.model.dtype,
        "device": config.device,
        "max_num_seqs": ready.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_model_len": ready.max_model_len,
        "num_blocks": ready.num_blocks,
        "block_size": ready.block_size,
    }


def find_tool_parser(
    settings: ServerSettings, tokenizer: Tokenizer, template: str | None
) -> str | None:
    """Who reads tool calls: the parser that is named, or the one for the chat template's form.

    template: as ``ServerSettings.chat_template``, with the text of a file. Raises ConfigError if
    calls are to be found, but nothing says in which form.
    """
    if not settings.enable_auto_tool_choice:
        return None
    if settings.tool_call_parser is not None:
        return settings.tool_call_parser
    problem = "its chat template shows none that is known"
    try:
        found = detect_tool_parser(tokenizer.chat_templates.choose(template, has_tools=True))
    except RequestError as error:
        found, problem = None, str(error).partition(". hint:")[0]
    if found is None:
        raise ConfigError(
            "`enable_auto_tool_choice` needs to know in which form the model writes calls, but "
            f"{problem}. hint: give `--tool-call-parser` ({', '.join(TOOL_PARSERS)})"
        )
    logger.info("tool calls are read in the form %s, which the chat template asks for", found)
    return found


def _url(settings: ServerSettings, port: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{port.getsockname()[1]}{settings.root_path}"


def _who_may(keys: tuple[str, ...]) -> str:
    return f"{len(keys)} API keys" if keys else "no API key needed"


def _configure_http_logging(access_log: bool) -> None:
    """uvicorn's log lines in our form: warnings, and one a request if asked for."""
    configure_logging()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access_log else logging.WARNING)
    for handler in logging.getLogger("paceline").handlers:
        if handler not in logging.getLogger("uvicorn").handlers:
            logging.getLogger("uvicorn").addHandler(handler)
