"""What Lightning says about every Trainer would hide a table of hundreds."""

import logging
import warnings
from typing import Any

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Settings of a Trainer that writes nothing."""


def hush() -> None:
    """No advice, and of messages only errors, in this process."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
