"""Makes ``model_dirs`` importable when only this directory is collected."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
