"""The settings of the models and data of the examples, which Hydra checks. Models are named by their import paths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class GPTSettings:
    _target_: str = "models.GPT"
    context: int = 64  # bytes
    width: int = 128
    heads: int = 4
    blocks: int = 4
    dropout: float = 0.1


@dataclass
class MLPSettings:
    _target_: str = "models.MLP"
    width: int = 256
    blocks: int = 4
    dropout: float = 0.1


@dataclass
class ResNetDigitsSettings:
    _target_: str = "models.ResNetDigits"
    channels: int = 16
    blocks: int = 4


@dataclass
class AdaptersSettings:
    _target_: str = "peft.LoraConfig"
    _convert_: str = "all"  # to lists, as peft needs them
    task_type: str = "CAUSAL_LM"
    r: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])


@dataclass
class LoRASettings:
    _target_: str = "lora_sweep.FineTuning"
    base: Any = MISSING  # the folder of a causal language model
    adapters: AdaptersSettings = field(default_factory=AdaptersSettings)


@dataclass
class DataSettings:
    _target_: str = MISSING
    batch_size: int = 32
    seed: int = 0


@dataclass
class StdlibSettings(DataSettings):
    _target_: str = "data.StdlibText"
    context: int = 64  # bytes
    windows: int = 6400  # per epoch


@dataclass
class DigitsSettings(DataSettings):
    _target_: str = "data.Digits"


SETTINGS: dict[str, type] = {
    "model/gpt": GPTSettings,
    "model/mlp": MLPSettings,
    "model/resnet_digits": ResNetDigitsSettings,
    "model/lora": LoRASettings,
    "data/stdlib": StdlibSettings,
    "data/digits": DigitsSettings,
}


def register() -> None:
    """Add the settings to Hydra's config store as examples/PATH, where PATH is the path of the file in conf/."""
    for path, settings in SETTINGS.items():
        group, _, name = f"examples/{path}".rpartition("/")
        ConfigStore.instance().store(group=group, name=name, node=settings)
