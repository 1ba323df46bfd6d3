"""The schema of conf/, with one dataclass per file.

A mistyped key or a wrong type raises an error before training starts.

Names and types are checked here. Ranges of values are checked where the values are used; for example, each schedule
checks its own fields. This module does not import torch, because Hydra loads it at the start of every app in the
environment.
"""

from __future__ import annotations

from dataclasses import MISSING as NOTHING
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import MISSING, OmegaConf

from lightning_pipes.ir.checks import InputError
from lightning_pipes.ir.registry import schedule_factory

SCHEDULE_FACTORY = "lightning_pipes.ir.registry.make_schedule"
CLUSTER_FACTORY = "lightning_pipes.cost.cluster.make_cluster"


@dataclass
class ScheduleSettings:
    """A schedule, given by the name of its entry point. Subclasses add the fields of the schedule.

    `hydra.utils.instantiate(cfg.schedule)` creates the schedule.
    """

    _target_: str = SCHEDULE_FACTORY
    name: str = MISSING


def schedule_schema(name: str) -> type[ScheduleSettings]:
    """Return the settings of the installed schedule `name`, with the types and defaults of its fields.

    Raises:
        InputError: there is no such schedule, or it is not a dataclass.
    """
    made = schedule_factory(name)
    if not is_dataclass(made):
        raise InputError(f"schedule {name!r} is made by {made!r}; its settings are found if it is a dataclass")
    types = {name: _configurable(hint) for name, hint in get_type_hints(made).items()}
    own: list[tuple[str, Any, Any]] = [("name", str, field(default=name))]
    for each in fields(made):
        if each.default_factory is not NOTHING:
            own.append((each.name, types[each.name], field(default_factory=each.default_factory)))
        else:
            own.append((each.name, types[each.name], MISSING if each.default is NOTHING else each.default))
    return make_dataclass(f"{name.title().replace('_', '')}Settings", own, bases=(ScheduleSettings,))


def _configurable(hint: Any) -> Any:
    """Return the type without union members that a config cannot hold. Such values are given by name instead."""
    if not isinstance(hint, UnionType):
        return hint
    return reduce(or_, (each for each in get_args(hint) if each.__module__ == "builtins"))


class _LazySchema(ConfigNode):
    """The schema of a schedule in Hydra's config store, created when it is first used.

    When the store returns a node, it copies the node and sets the value of the copy.
    """

    def __init__(self, name: str, group: str, schedule: str) -> None:
        self.name, self.group, self.package, self.provider = f"{name}.yaml", group, None, "lightning_pipes"
        self._schedule = schedule
        self._made: Any = None

    @property
    def node(self) -> Any:
        if self._made is None:
            self._made = OmegaConf.structured(schedule_schema(self._schedule))
        return self._made

    @node.setter
    def node(self, made: Any) -> None:
        self._made = made


def register_schedule(name: str, group: str) -> None:
    """Add the schema of an installed schedule to Hydra's config store, as `group`/`name`."""
    here: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        here = here.setdefault(part, {})
    here[f"{name}.yaml"] = _LazySchema(name, group, name)


@dataclass
class AutoSettings(ScheduleSettings):
    """Settings without a fixed schedule. The strategy chooses one."""

    _target_: str = "lightning_pipes.trainer.plan.settings.chosen_later"
    name: str = "auto"


@dataclass
class PipelineSettings:
    """The arguments of PipelineStrategy without the schedule, in the same order and with the same defaults."""

    microbatches: int | None = None
    microbatches_by: str = "samples"  # or tokens, which sorts sequences by length, or auto
    module: str | None = None
    partition: Any = "auto"  # or parameters, or a list of the first layers of the stages 1, 2, ...
    recompute: Any = False  # or auto: as memory requires, or late: after the gradient has arrived, or a list of stages
    loss: str = "auto"  # the samples for which the loss is computed together: or microbatch, batch
    check_loss: bool = True  # whether to check that the losses of micro-batches combine to the loss of their batch
    verify: Any = 0  # number of batches that a single plain process also trains, to compare; or warn
    seed: int = 0
    data_parallel: Any = 1  # or a list with the number of ranks of each stage
    tensor_parallel: int = 1
    shard_optimizer: bool = False  # across the replicas
    checkpoint: str = "full"  # or sharded
    async_checkpoint: bool = False
    gather: str = "auto"  # the ranks that get the whole module after training: or all, rank0, trained, none
    replan: Any = False  # whether layers move between ranks during training; or settings of dynpipe's planner
    relocation: str = "blocking"  # how layers move between ranks: or overlapped, buffered
    stages: Any = None  # or auto, or the batches until a target, by number of stages
    stale_gradients: Any = False  # whether schedule=auto may use stale gradients; or the batches, by number of stages
    transport: str = "auto"  # or local, gloo, nccl
    heartbeat_timeout: float = 120.0  # seconds without a heartbeat after which a process counts as failed


@dataclass
class TrainerSettings:
    """The arguments of Lightning's Trainer that are useful on the command line."""

    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    precision: str = "32-true"
    max_epochs: int | None = 1
    max_steps: int = -1
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = 0
    log_every_n_steps: int = 10
    enable_progress_bar: bool = True
    enable_model_summary: bool = False
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    deterministic: bool | None = None


@dataclass
class OptimizerSettings:
    """AdamW with a linear warm-up. `warmup` is the number of warm-up steps."""

    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: int = 0


@dataclass
class LinkSettings:
    """The link between two devices, in each direction."""

    bandwidth: str = "inf"  # such as 12.5GB/s or 100Gbit/s
    latency: str = "0us"


@dataclass
class ClusterSettings:
    """Equal devices on equal hosts. `hydra.utils.instantiate(cfg.cluster)` creates the Cluster."""

    _target_: str = CLUSTER_FACTORY
    hosts: int = 1
    devices_per_host: int = 1
    memory: str | None = None  # memory of a device, such as 16GiB; null for no limit
    inside: LinkSettings = field(default_factory=LinkSettings)  # between devices of one host
    between: LinkSettings = field(default_factory=LinkSettings)  # between devices of different hosts


@dataclass
class TrainSettings:
    """The settings of a training: of the strategy, the trainer and the optimizer, and the app's own model and data."""

    schedule: Any = MISSING  # a schedule of another distribution has its own schema
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    model: Any = None
    data: Any = None
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    seed: int = 0
    resume: bool = True  # from the newest checkpoint in the run directory, if there is one


@dataclass
class LayersSettings:
    """Layers, given by a profile or computed by formula, and the devices and links on which they run."""

    profile: str | None = None
    model: str | None = None
    device: str = "A100-80G"
    dtype: str = "bfloat16"
    optimizer: str = "adam"
    ranks: int = 4
    schedule: Any = None
    memory: str | None = None  # such as 16GiB
    bandwidth: str = "inf"  # such as 12.5GB/s or 100Gbit/s
    latency: str = "0us"
    regime: str = "asynchronous"  # or blocking, shared, blocking_shared
    cluster: Any = None


@dataclass
class PlanSettings(LayersSettings):
    """Settings of `lightning-pipes plan`."""

    replicas: int = 1
    batch: int = 32
    microbatches: Any = None  # a number or a list
    recompute: Any = None  # or true, false, late, or a list of stages
    stale_gradients: Any = False  # or the batches until the target, by number of stages


@dataclass
class SimulateSettings(LayersSettings):
    """Settings of `lightning-pipes simulate`."""

    microbatches: int = 8
    forward: Any = "10ms"  # or a list with one time per rank
    backward: Any = "20ms"
    step: Any = "0ms"
    message: str = "0B"
    activations: str = "0B"
    weights: str = "0B"
    batch: int | None = None
    partition: Any = None
    recompute: Any = False  # or auto: as memory requires, or late: after the gradient has arrived, or a list of stages


@dataclass
class ProfileSettings:
    """Settings of `lightning-pipes profile`."""

    model: str | None = None
    rows: Any = field(default_factory=lambda: [1, 2, 4, 8])
    repeats: int = 5
    device: str = "cpu"
    threads: int = 1
    optimizer: str | None = None
    split: bool = False
    out: str = "profile.json"


SCHEMAS: dict[str, type] = {
    "train": TrainSettings,
    "plan": PlanSettings,
    "simulate": SimulateSettings,
    "profile": ProfileSettings,
    "cluster": ClusterSettings,
    "schedule/auto": AutoSettings,
}


SCHEMA_GROUP = "lightning_pipes/schema"
CONFIG_PATH = Path(__file__).parent.parent / "conf"


def our_schedules() -> list[str]:
    """Return the names of the files in conf/schedule/ that belong to an installed schedule."""
    return sorted(
        path.stem for path in (CONFIG_PATH / "schedule").glob("*.yaml") if f"schedule/{path.stem}" not in SCHEMAS
    )


def register() -> None:
    """Add the schemas to Hydra's config store as lightning_pipes/schema/PATH.

    PATH is the path of the file in conf/.
    """
    for path, schema in SCHEMAS.items():
        group, _, name = f"{SCHEMA_GROUP}/{path}".rpartition("/")
        ConfigStore.instance().store(group=group, name=name, node=schema, provider="lightning_pipes")
    for name in our_schedules():
        register_schedule(name, f"{SCHEMA_GROUP}/schedule")
