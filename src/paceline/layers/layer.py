"""The base of everything a decoder is made of: a torch module that costs little to call.

A decode step on a CPU calls hundreds of layers for a few microseconds of work each, so what
``nn.Module`` does around a call (hooks, tracing) and around an attribute would show.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Layer(nn.Module):
    """Inference only: a call is ``forward`` itself, without hooks."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Found as a plain attribute, not through nn.Module's __getattr__.
        self.__dict__[name] = value
