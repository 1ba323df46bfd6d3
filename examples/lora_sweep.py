"""Tune LoRA in a pipeline of two processes: `python examples/lora_sweep.py` trains adapters of different ranks over one
frozen base, four at a time. Each process holds its half of the base once. Bad trials are pruned, and the adapters of
every other trial are written in the format of peft. `python examples/train.py -m model=lora` uses the same module in a
multirun of Hydra.

The script needs the packages transformers, peft and safetensors. It downloads nothing: the base is a small Llama with
random weights, unless `--base` names a folder that `save_pretrained` has written.
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
import torch
from data import StdlibText
from models import Task
from peft import LoraConfig, get_peft_model
from plots import save_sweep
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from lightning_pipes import JobArray, OptunaPruning, PipelineStrategy, load_pretrained, optimize_array


class FineTuning(Task):
    """Trains adapters of a causal language model.

    Args:
        base: the folder of the model.
        adapters: the settings of the adapters.
        lr: the learning rate.
        weight_decay: the weight decay of AdamW.
        warmup: the number of warm-up steps.
    """

    def __init__(
        self, base: str | Path, adapters: LoraConfig, lr: float = 1e-2, weight_decay: float = 0.01, warmup: int = 0
    ) -> None:
        super().__init__(lr, weight_decay, warmup)
        self.base, self.adapters = Path(base), adapters
        self.net: Any = None

    def configure_model(self) -> None:
        """Build the model without memory. Each process reads its own layers, and only for the first trial."""
        if self.net is None:
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(self.base)
                net = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
                load_pretrained(net, self.base)
                self._check_targets(net)
                self.net = get_peft_model(net, self.adapters)

    def _check_targets(self, net: nn.Module) -> None:
        """Raise a ValueError if the base has no layer with one of the names. peft ignores a name if others match."""
        layers = {name.rpartition(".")[2]: layer for name, layer in net.named_modules() if not [*layer.children()]}
        missing = sorted(set(self.adapters.target_modules) - layers.keys())
        if missing:
            matrices = [name for name, layer in layers.items() if any(p.ndim == 2 for p in layer.parameters())]
            raise ValueError(
                f"The base {self.base} has no layers named {', '.join(missing)}. Choose the target modules of the "
                f"adapters from {', '.join(sorted(matrices))}."
            )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(input_ids=batch[0], labels=batch[0]).loss)

    def save_adapters(self, folder: Path) -> None:
        """Write the adapters in the format of peft. After `fit`, process 0 has the adapters of all stages."""
        self.net.save_pretrained(folder)


def objective(trial: optuna.trial.BaseTrial) -> float:
    """Return the validation loss. Apart from the strategy, this is an ordinary objective."""
    L.seed_everything(0, verbose=False)
    rank = trial.suggest_categorical("rank", [2, 4, 8, 16])
    targets = trial.suggest_categorical("targets", ["q_proj v_proj", "q_proj k_proj v_proj o_proj"])
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=rank * trial.suggest_categorical("alpha_over_rank", [1, 2]),
        lora_dropout=trial.suggest_float("dropout", 0.0, 0.2),
        target_modules=targets.split(),
    )
    module = FineTuning(base, adapters, trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    batch_size = trial.suggest_categorical("batch_size", [16, 32])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy("jap", microbatches=1),
        max_epochs=arguments.epochs,
        callbacks=[OptunaPruning("val_loss")],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, StdlibText(context=64, windows=arguments.windows, batch_size=batch_size))
    if trainer.is_global_zero:
        module.save_adapters(arguments.out / f"trial_{trial.number}")
    return float(trainer.callback_metrics["val_loss"])


def make_base(folder: str | Path) -> Path:
    """Write a small Llama with random weights, unless the folder exists, and return the folder."""
    folder = Path(folder)
    if not folder.exists():
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
        own = folder.with_name(f"{folder.name}.{os.getpid()}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(own)
        try:
            own.rename(folder)
        except OSError:  # another process was faster
            for file in own.iterdir():
                file.unlink()
            own.rmdir()
    return folder


if __name__ == "__main__":  # each process runs this script
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="the folder of a causal language model; by default, a small Llama")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=640, help="windows of text in an epoch")
    parser.add_argument("--storage", help="where the study is kept, such as sqlite:///study.db")
    parser.add_argument("--out", type=Path, default=Path("outputs/lora_sweep"), help="the directory of all results")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated.*")
    arguments.out.mkdir(parents=True, exist_ok=True)
    base = arguments.base or make_base(arguments.out / "base")

    def make_study() -> optuna.Study:
        return optuna.create_study(
            study_name="lora",
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
        print(f"best {study.best_value:.3f}, adapters {arguments.out / f'trial_{study.best_trial.number}'}")
        if array.timeline is not None:
            save_sweep(study.trials[-arguments.trials :], array.timeline, arguments.out / "sweep.png", "val_loss")
            print(f"picture {arguments.out / 'sweep.png'}")
