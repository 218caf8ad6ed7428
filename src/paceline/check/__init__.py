"""The dry run: every fault and the memory plan, found without loading anything.

Reads JSON files and safetensors headers. Must not import torch: ``paceline check`` answers at once.
"""

from paceline.check.report import CheckReport, Fault
from paceline.check.run import run_checks

__all__ = ["CheckReport", "Fault", "run_checks"]
