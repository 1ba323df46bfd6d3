"""Modules and caches that the server of forked ranks prepares once for all ranks.

Each rank would otherwise import these modules itself when it needs them, and fill the caches of Lightning and of
abstract base classes, as the short fit below does.
"""

import encodings.idna  # noqa: F401
import logging
import warnings

import torch
from torch.utils.data import DataLoader

from lightning_pipes.strategies import deep, kfkb, one_f_one_b, per_link, ready, zero_bubble  # noqa: F401
from tests.trainer.lit import Lit, data
from tests.trainers import make_trainer

logging.disable(logging.CRITICAL)
threads = torch.get_num_threads()
torch.set_num_threads(1)  # OpenMP threads do not survive a fork, and ranks with several threads would hang
with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    loader = DataLoader(data(), batch_size=8)
    make_trainer(devices=1, max_steps=2, precision="64-true").fit(Lit(), loader, loader)
torch.set_num_threads(threads)
logging.disable(logging.NOTSET)
