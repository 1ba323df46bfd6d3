"""What Lightning says about every Trainer would hide a table of hundreds."""

import logging
import warnings


def hush() -> None:
    """No advice, and of messages only errors, in this process."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
