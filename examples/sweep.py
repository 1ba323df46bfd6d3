"""A search in plain Python: `python examples/sweep.py` tries sixteen settings, four at a time, which share one pipeline
of two processes. Bad trials are pruned after an epoch or two. The script saves a picture of the search.

    python examples/sweep.py                 # a small residual network on scikit-learn's digits
    python examples/sweep.py --model gpt     # a transformer on the bytes of Python's standard library
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import optuna
from data import Digits, StdlibText
from models import GPT, ResNetDigits
from plots import save_sweep

from lightning_pipes import JobArray, OptunaPruning, PipelineStrategy, optimize_array


def objective(trial: optuna.trial.BaseTrial) -> float:
    """Return the validation loss. Apart from the strategy, this is an ordinary objective."""
    L.seed_everything(0, verbose=False)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    weight_decay = trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True)
    model: L.LightningModule
    data: L.LightningDataModule
    if arguments.model == "gpt":
        model = GPT(context=64, width=64, lr=lr, weight_decay=weight_decay)
        batch_size = trial.suggest_categorical("batch_size", [16, 32, 64])
        data = StdlibText(context=64, windows=arguments.windows, batch_size=batch_size)
    else:
        model = ResNetDigits(channels=24, lr=lr, weight_decay=weight_decay)
        data = Digits(batch_size=trial.suggest_categorical("batch_size", [64, 128, 256]))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy("jap", partition=[3]),  # two of the four blocks on each process
        max_epochs=arguments.epochs,
        callbacks=[OptunaPruning("val_loss")],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    return float(trainer.callback_metrics["val_loss"])


if __name__ == "__main__":  # each process runs this script
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["resnet", "gpt"], default="resnet")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=640, help="windows of text that the GPT reads in an epoch")
    parser.add_argument(
        "--storage", help="where the study is kept, such as sqlite:///study.db; a later call continues it"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/sweep"), help="the directory of the picture")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated.*")

    def make_study() -> optuna.Study:
        return optuna.create_study(
            study_name=arguments.model,
            storage=arguments.storage,
            load_if_exists=True,
            sampler=optuna.samplers.TPESampler(seed=0),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        )

    array = JobArray[Any](4)
    study = optimize_array(make_study, objective, n_trials=arguments.trials, array_size=array)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for t in study.trials:
            value = "" if t.value is None else f"{t.value:.3f}"
            print(f"{t.number:3} {t.state.name:8} {value:6} {t.params}")
        print(f"best {study.best_value:.3f} with {study.best_params}")
        if array.timeline is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            save_sweep(study.trials[-arguments.trials :], array.timeline, arguments.out / "sweep.png", "val_loss")
            print(f"picture {arguments.out / 'sweep.png'}")
