"""Reads layers, devices and schedules from the settings of a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_pipes.cost import Cluster, Device, Link, ModelProfile
from lightning_pipes.cost.units import parse_bytes, parse_rate, parse_seconds, parse_setting
from lightning_pipes.cost.zoo import named_profile
from lightning_pipes.ir import MAX_STAGES, InputError, Policy, Schedule, check_count, short_repr

_T = TypeVar("_T")
MAX_SAMPLES = 2**16
"""The largest allowed number of micro-batches, and of samples to measure."""


def profile_from_settings(cfg: DictConfig) -> ModelProfile | None:
    """Return the profile that the settings specify, or None if they specify neither a file nor a model.

    The profile is read from the file `profile`, or computed by formula for the model `model`.

    Raises:
        InputError: both are set, the file is not a profile, or the name of the model is unknown.
    """
    if cfg.profile is not None and cfg.model is not None:
        raise InputError(f"profile={cfg.profile} and model={cfg.model}: give only one of them")
    if cfg.profile is not None:
        return load_profile(cfg.profile)
    if cfg.model is None:
        return None
    if Path(str(cfg.model)).suffix == ".json":
        raise InputError(f"model={cfg.model} looks like a file; use profile={cfg.model}")
    return named_profile(str(cfg.model), cfg.device, dtype=cfg.dtype, optimizer=cfg.optimizer)


def require_profile(cfg: DictConfig, command: str) -> ModelProfile:
    """Return the profile that the settings specify, for a command that cannot run without one.

    Raises:
        InputError: no profile is specified, or `profile_from_settings` raises this error.
    """
    profile = profile_from_settings(cfg)
    if profile is None:
        raise InputError(
            f"{command} needs layers: profile=FILE from lightning-pipes profile, or model=NAME by formula, as in "
            "model=GPT-2-345M device=A100-40G"
        )
    return profile


def load_profile(path: str) -> ModelProfile:
    """Return the profile in a file.

    Raises:
        InputError: there is no such file, or it is not a profile.
    """
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}; `lightning-pipes profile out={path}` writes one")
    return ModelProfile.load(path)


def cluster_from_settings(cfg: DictConfig, devices: int) -> Cluster:
    """Return the cluster that the settings specify, by default one host with `devices` devices and equal links.

    Args:
        cfg: the settings of the command.
        devices: the number of devices that the cluster must have at least.

    Raises:
        InputError: the cluster has too few devices, or its links are specified twice.
    """
    check_count("devices", devices, "; change the number of ranks, or of replicas", most=MAX_STAGES)
    memory = None if cfg.memory is None else read_setting(cfg, "memory", parse_bytes)
    link = Link(read_setting(cfg, "bandwidth", parse_rate), read_setting(cfg, "latency", parse_seconds))
    if cfg.cluster is None:
        return Cluster((Device(memory),) * devices, inside=link, regime=cfg.regime)
    if link != Link():
        raise InputError("bandwidth and latency are for one host; with a cluster set cluster.inside.bandwidth=...")
    made: Cluster = replace(instantiate(cfg.cluster), regime=cfg.regime)
    if len(made.devices) < devices:
        per_host = cfg.cluster.devices_per_host
        raise InputError(
            f"{devices} devices are needed, but the cluster has {len(made.devices)}; set "
            f"cluster.hosts={-(-devices // per_host)}, or use fewer ranks or replicas"
        )
    if memory is not None:
        made = replace(made, devices=tuple(replace(device, memory=memory) for device in made.devices))
    return made


def schedule_from_settings(cfg: DictConfig) -> Schedule | Policy | None:
    """Return the schedule that the settings specify, or None for schedule=auto."""
    return None if cfg.schedule is None or cfg.schedule.name == "auto" else instantiate(cfg.schedule)


def parse_numbers(value: Any, name: str, most: int = MAX_SAMPLES) -> list[int]:
    """Return a number or a list of numbers as a list. The list is empty for null.

    Raises:
        InputError: `value` is something else, or a number is less than 1 or greater than `most`.
    """
    if value is None:
        return []
    most = min(most, MAX_SAMPLES)
    found = OmegaConf.to_container(value) if isinstance(value, ListConfig) else [value]
    assert isinstance(found, list)
    if not found or not all(type(each) is int and 1 <= each <= most for each in found):
        raise InputError(
            f"{name}={short_repr(value)}: needs a number from 1 to {most}, or a list of them, as in {name}=[4,8]; more "
            "would take minutes"
        )
    return found


def parse_durations(value: Any, name: str, count: int) -> list[float]:
    """Return the seconds of each of `count` ranks, given one time or a list of times.

    Raises:
        InputError: the list has another length, or a value is not a time.
    """
    found: Sequence[Any] = list(value) if isinstance(value, ListConfig) else [value] * count
    if len(found) != count:
        raise InputError(f"{name} lists {len(found)} times for {count} ranks; give one time, or one for each rank")
    return [parse_setting(name, parse_seconds, each) for each in found]


def read_setting(cfg: DictConfig, name: str, parse: Callable[[Any], _T]) -> _T:
    """Return the setting `name`, parsed by a function of `cost.units`.

    Raises:
        InputError: the setting cannot be parsed.
    """
    return parse_setting(name, parse, cfg[name])
