"""Log lines of the engine: plain text on standard error, beside a progress bar if there is one."""

from __future__ import annotations

import logging
import sys

from tqdm import tqdm

LOGGER_NAME = "paceline"


class _BarFriendlyHandler(logging.Handler):
    """Writes through tqdm, so that a line does not cut a progress bar in two."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def configure_logging(level: int = logging.INFO) -> None:
    """Show Paceline's log lines unless the program has set up logging itself.

    The first call decides: a command that wants fewer lines calls it before it makes an ``LLM``.
    """
    logger = logging.getLogger(LOGGER_NAME)
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = _BarFriendlyHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(level)
