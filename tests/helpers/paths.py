"""Where things are."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
DATA = HELPERS / "data"
