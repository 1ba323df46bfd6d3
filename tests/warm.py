"""Imported once by the server that ranks are forked from, for what each rank would do by itself: modules that are
imported late, and caches of Lightning and of abstract base classes, which a plain fit fills."""

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
torch.set_num_threads(1)  # threads of OpenMP do not survive a fork: ranks that use several would wait for them
with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    loader = DataLoader(data(), batch_size=8)
    make_trainer(devices=1, max_steps=2, precision="64-true").fit(Lit(), loader, loader)
torch.set_num_threads(threads)
logging.disable(logging.NOTSET)
