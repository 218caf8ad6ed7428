"""Every error Paceline raises on purpose.

::

    PacelineError
    ├── ConfigError      an engine argument, a model or a pair that cannot work (before weights
    load) ├── CapacityError    memory or KV space too small; the message has the numbers
    ├── RequestError     one request is wrong; the engine and other requests live on
    └── EngineError      the engine is closed or its runner failed

``ConfigError``, ``CapacityError`` and ``RequestError`` are also ``ValueError``, so that callers who
moved from an engine raising that keep working.
"""


class PacelineError(Exception):
    """Base of the tree above."""


class ConfigError(PacelineError, ValueError):
    """A setting, model directory or target/drafter pair cannot work."""


class CapacityError(PacelineError, ValueError):
    """Something does not fit into memory or into the KV pool."""


class RequestError(PacelineError, ValueError):
    """A request that cannot be served as asked."""


class PromptTooLongError(RequestError):
    """A prompt that cannot fit into the model's context."""


class EngineError(PacelineError, RuntimeError):
    """The engine cannot go on: closed, or its runner failed."""
