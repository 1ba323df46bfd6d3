"""Settings that silence Lightning, because its messages about hundreds of Trainers would hide a table."""

import logging
import warnings
from typing import Any

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer that writes nothing."""


def hush() -> None:
    """Suppress all warnings in this process, and all messages of Lightning except errors."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
