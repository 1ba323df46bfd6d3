"""Tests of public constructors with random arguments.

If an argument makes no sense, a PlanError names it at once. Otherwise, the constructor accepts it.
"""

from __future__ import annotations

import math
import random
import resource
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.samplers import RandomSampler

from lightning_pipes import (
    JobArray,
    MemorySwap,
    OptunaPruning,
    PipelineStrategy,
    ReproducibilityLog,
    ScheduleTuner,
    TimelineLogger,
    consolidate,
)
from lightning_pipes.cost import Cluster, CostModel, Deployment, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.cost.cluster import make_cluster
from lightning_pipes.cost.units import parse_bytes, parse_rate, parse_seconds
from lightning_pipes.cost.zoo import VALUES_PER_PARAMETER, named_profile
from lightning_pipes.ir import Cut, Kind, PipelineError, Plan, Policy, Schedule, Span
from lightning_pipes.ir.registry import installed_schedules, make_schedule
from lightning_pipes.supernets import (
    ChoiceBlock,
    Evolution,
    ExplorerFeedback,
    FromIterable,
    FromList,
    OptunaExplorer,
    RoundRobin,
    SearchSpace,
    SharedLayer,
    Subnet,
    SubnetStream,
    Supernet,
    Uniform,
    bulk_synchronous,
    measure_layer_costs,
)
from lightning_pipes.supernets.layers import MAX_COPIES, PerChoice
from lightning_pipes.tune.studies.study import optimize_array
from tests.fuzz.values import Door, count, deadline, flag, integer, number, optional, perturbed, several, text

FEW, MANY = 1500, 30_000
FINITE = 1e9


def positive(value: Any) -> bool:
    return number(value) and value > 0


def above_zero(value: Any) -> bool:
    return positive(value) and value < math.inf


def least_zero(value: Any) -> bool:
    return number(value) and 0 <= value < math.inf


def whole(value: Any) -> bool:
    return integer(value) and value >= 0


def never(value: Any) -> bool:
    """Reject every value."""
    return False


def unit(parse: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Return a predicate for values that a unit parser accepts. The parsers have their own tests."""

    def sense(value: Any) -> bool:
        try:
            parse(value)
        except PipelineError:
            return False
        return number(value) or isinstance(value, str)

    return sense


def table(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def schedule(value: Any) -> bool:
    if isinstance(value, str):
        return value == "auto" or value in installed_schedules()
    return isinstance(value, Schedule | Policy) and not isinstance(value, type)


def recomputation(value: Any) -> bool:
    """Return whether a value makes sense for `recompute`: a flag, or the numbers of different stages."""
    numbers = isinstance(value, list | tuple | range) and all(type(n) is int and n >= 0 for n in value)
    return flag(value) or (numbers and 0 < len(value) == len(set(value)))


def partition(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("auto", "parameters")
    return isinstance(value, list | tuple | range) and all(map(whole, value)) and list(value) == sorted(value)


def study() -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study()


def optimized(**given: Any) -> Any:
    """Call `optimize_array` without any trials."""
    if given.get("n_trials") is None or count(given["n_trials"]):
        given["n_trials"] = 0
    if given.get("study") is len:
        del given["study"]
    return optimize_array(**{"study": study, "n_trials": 0, **given})


LINK = {
    "bandwidth": lambda v: positive(v) and (v == math.inf or v < 1e400),
    "latency": lambda v: number(v) and 0 <= v < FINITE,
    "burst": least_zero,
    "peak": lambda v: number(v) and v == math.inf,
    "max_in_flight": whole,
    "wire": text,
    "blocking": flag,
}
SECONDS = {(Kind.F, 0): ((1, 1.0),), (Kind.B, 0): ((1, 1.0),)}
LAYER = LayerProfile("layer", ((1, 1.0),), ((1, 2.0),))
TABLES = ("input_backward", "weight_backward", "saved", "output", "working")
BYTES = ("activation_bytes", "weight_bytes", "state_bytes")
SIZES = several(lambda v: whole(v))


def of_stages(v: Any) -> bool:
    """Accept an empty sequence of sizes, or one size for a single stage."""
    return SIZES(v) and len(v) in (0, 1)


def written(*texts: str) -> Callable[[Any], bool]:
    """Return a predicate that accepts these texts, and numbers."""
    return lambda v: v in texts if isinstance(v, str) else least_zero(v) and v < 1e30


DOORS = [
    Door(parse_bytes, {"value": written("4", "16GiB")}, call_it={"value": "size"}),
    Door(parse_seconds, {"value": written("4", "10us")}, call_it={"value": "time"}),
    Door(
        parse_rate,
        {
            "value": lambda v: (
                v in ("4", "12.5GB/s", "inf") if isinstance(v, str) else positive(v) and (v < 1e30 or v == math.inf)
            )
        },
        call_it={"value": "rate"},
    ),
    Door(
        PipelineStrategy,
        {
            "schedule": schedule,
            "microbatches": optional(partial(count, most=2**16)),
            "data_parallel": count,
            "schedule_args": optional(lambda v: isinstance(v, dict) and not v),
            "module": optional(text),
            "partition": partition,
            "recompute": recomputation,
            "seed": lambda v: integer(v) and -(2**63) <= v < 2**63,
            "transport": lambda v: isinstance(v, str) and v in ("auto", "local", "gloo", "nccl"),
            "checkpoint": lambda v: isinstance(v, str) and v in ("full", "sharded"),
            "async_checkpoint": flag,
            "timeout": lambda v: isinstance(v, timedelta) and v > timedelta(0),
            "heartbeat_timeout": lambda v: number(v) and v >= 2,
            "relocation": lambda v: isinstance(v, str) and v in ("blocking", "overlapped", "buffered"),
            "tensor_parallel": count,
            "shard_optimizer": lambda v: v is False,  # because data_parallel is 1
            "process_group_backend": lambda v: v is None,
            "stages": lambda v: v is None,  # because the schedule flushes
            "accelerator": lambda v: v is None,
            "parallel_devices": lambda v: v is None or (isinstance(v, list | tuple) and not v),
            "cluster_environment": lambda v: v is None,
            "checkpoint_io": lambda v: v is None,
            "precision_plugin": lambda v: v is None,
        },
        call_it={"schedule_args": "schedule"},
    ),
    Door(
        JobArray,
        {"size": count, "progress": optional(flag), "memory": lambda v: v is None, "rounds": optional(callable)},
        {"size": 2},
    ),
    Door(
        MemorySwap,
        {
            "device_bytes": count,
            "host_bytes": optional(count),
            "slots": optional(lambda v: count(v) and v >= 2),
            "bandwidth": optional(positive),
            "prefetch": flag,
        },
        {"device_bytes": 1000},
        call_it={"slots": "slot"},
    ),
    Door(
        ScheduleTuner,
        {
            "interval": lambda v: count(v) or (isinstance(v, timedelta) and v > timedelta(0)),
            "memory_limit": optional(unit(parse_bytes)),
            "sizes": lambda v: several(count)(v) or (isinstance(v, range) and 0 not in v),
            "hysteresis": lambda v: number(v) and 0 <= v < 1,
            "window": count,
            "probe": flag,
        },
    ),
    Door(TimelineLogger, {"every_n_steps": count}),
    Door(OptunaPruning, {"monitor": text}),
    Door(
        optimized,
        {
            "study": lambda v: v is len,
            "objective": callable,
            "n_trials": lambda v: v is None or (integer(v) and v >= 0),
            "array_size": count,
            "timeout": optional(lambda v: number(v) and v >= 0),
            "catch": lambda v: v == () if isinstance(v, tuple) else False,
            "callbacks": several(callable),
        },
        {"objective": len, "array_size": 2},
        given_name="optimize_array",
    ),
    Door(Link, LINK),
    Door(Device, {"memory": optional(whole), "speed": above_zero, "host": text}),
    Door(
        Cluster,
        {
            "devices": never,
            "inside": never,
            "between": never,
            "links": lambda v: isinstance(v, dict) and not v,
            "shared": flag,
            "regime": never,
        },
        {"devices": (Device(),) * 2},
        call_it={"devices": "device"},
    ),
    Door(
        Cluster.from_counts,
        {
            "hosts": partial(count, most=2**12),
            "devices_per_host": partial(count, most=2**12),
            "memory": optional(whole),
            "inside": never,
        },
        {"hosts": 1, "devices_per_host": 1},
    ),
    Door(
        make_cluster,
        {
            "hosts": partial(count, most=2**12),
            "devices_per_host": partial(count, most=2**12),
            "memory": optional(unit(parse_bytes)),
            "inside": lambda v: v is None or (isinstance(v, dict) and not v),
            "between": lambda v: v is None or (isinstance(v, dict) and not v),
        },
    ),
    Door(
        Deployment.from_cluster,
        {"cluster": never, "ranks": lambda v: count(v, 4), "replicas": lambda v: count(v, 4), "neighbours": never},
        {"cluster": Cluster((Device(),) * 4), "ranks": 1},
    ),
    Door(
        Deployment,
        {"pipeline": never, "replicas": lambda v: integer(v) and v == 1, "rings": several(never)},
        {"pipeline": Cluster((Device(),))},
    ),
    Door(
        CostModel,
        {
            "seconds": lambda v: isinstance(v, dict) and not v,
            "forward_bytes": lambda v: isinstance(v, list | tuple) and not v,
            "backward_bytes": lambda v: isinstance(v, list | tuple) and not v,
            "links": lambda v: isinstance(v, dict) and not v,
            "link": never,
            **dict.fromkeys(BYTES, of_stages),
            "working_bytes": lambda v: several(least_zero)(v) and len(v) in (0, 1),
            "waiting_messages": whole,
            "overhead": least_zero,
            "joining": least_zero,
            "regime": never,
            "each": lambda v: isinstance(v, dict) and not v,
            "scatter": lambda v: isinstance(v, dict) and not v,
        },
        {"seconds": SECONDS},
    ),
    Door(
        CostModel.uniform,
        {
            "stages": partial(count, most=2**12),
            "forward": least_zero,
            "backward": least_zero,
            "step": least_zero,
            "rows": optional(count),
            "message_bytes": least_zero,
            "link": never,
            "activation_bytes": whole,
            "weight_bytes": whole,
            "overhead": least_zero,
        },
        {"stages": 2, "forward": 1.0, "backward": 2.0},
    ),
    Door(
        LayerProfile,
        {
            "name": text,
            **dict.fromkeys(("forward", "backward", *TABLES), table),
            "step": least_zero,
            **dict.fromkeys(("weight_bytes", "gradient_bytes", "optimizer_bytes"), whole),
            "keeps_input": flag,
        },
        {"name": "x", "forward": ((1, 1.0),), "backward": ((1, 1.0),)},
    ),
    Door(
        ModelProfile,
        {
            "layers": never,
            "before": never,
            "after": never,
            "overhead": least_zero,
            "joining": least_zero,
            "widened": above_zero,
            "device": text,
            "source": text,
            "notes": lambda v: isinstance(v, dict) and all(isinstance(key, str) for key in v),
        },
        {"layers": (LAYER,)},
    ),
    Door(
        partial(named_profile, "VGG-16"),
        {
            "device": never,
            "rows": lambda v: isinstance(v, list | tuple | range) and len(v) and all(map(count, v)) and v != [3, 1],
            "dtype": never,
            "optimizer": lambda v: isinstance(v, str) and v in VALUES_PER_PARAMETER,
            "recompute": flag,
        },
        {"rows": (1, 2)},
        given_name="named_profile",
    ),
    Door(
        Plan.even,
        {
            "stages": lambda v: count(v, 2**12),
            "microbatches": lambda v: count(v, 2**16),
            "rows": optional(count),
            "ranks": lambda v: v is None or (isinstance(v, list | tuple) and list(v) == [0, 0]),
            "layers": lambda v: isinstance(v, list | tuple) and not v,
            "recompute": lambda v: isinstance(v, list | tuple) and not v,
        },
        {"stages": 2, "microbatches": 2},
        call_it={"microbatches": "micro"},
    ),
    Door(
        Plan,
        {
            "ranks": lambda v: isinstance(v, list | tuple) and list(v) == [0, 0],
            "jobs": never,
            "batches": count,
            "versions": lambda v: isinstance(v, list | tuple) and list(v) in ([], [3, 1]),
            "shared_weights": flag,
            "limits": lambda v: isinstance(v, list | tuple) and list(v) in ([], [0, 0], [3, 1]),
            "split_backward": flag,
            "recompute": lambda v: isinstance(v, list | tuple) and not v,
            "layers": lambda v: isinstance(v, list | tuple) and not v,
            "after": lambda v: isinstance(v, dict) and not v,
        },
        {"ranks": (0, 1), "jobs": (Cut.even(2, 2, 2),)},
        call_it={"jobs": "job", "ranks": "rank"},
    ),
    Door(
        Cut,
        {"rows": lambda v: integer(v) and v == 2, "forward": never, "backward": table, "forward_links": table},
        {"rows": 2, "forward": ((Span(0, 2),),)},
        call_it={"rows": ""},
    ),
    *(
        Door(partial(make_schedule, name), sense, given_name=name)
        for name, sense in {
            "kfkb": {"k": lambda v: count(v) or (isinstance(v, str) and v == "auto")},
            "interleaved": {"stages_per_rank": partial(count, most=2**12)},
            "hanayo": {"waves": partial(count, most=2**12)},
            "v": {"k": lambda v: v is None or count(v, most=2**12), "split": flag},
            "deep": {"slack": whole},
            "per_link": {"extra": several(whole)},
            "ready": {"slack": whole, "limits": several(count), "alternate": flag},
            "gpipe": {"k": never},
            "zero_bubble": {"x": never},
            "jap": {"size": never},
        }.items()
    ),
    Door(make_schedule, {"name": lambda v: isinstance(v, str) and v == "1f1b"}, call_it={"name": "schedule"}),
]

IDENTITY = torch.nn.Identity()


def choices(value: Any) -> bool:
    return isinstance(value, list | tuple | range) and all(map(integer, value))


def two_choices(value: Any) -> bool:
    return choices(value) and len(value) == 2 and set(value) <= {0, 1}


def layers(value: Any) -> bool:
    return isinstance(value, dict) and not value


def count_of_copies(value: Any) -> bool:
    return count(value, MAX_COPIES)


def supernet(layer: Any, **given: Any) -> Any:
    return Supernet(layer, ChoiceBlock([torch.nn.Identity()]), **given)


def several_explorers(explorer: Any) -> Any:
    return RoundRobin(explorer, Uniform(SearchSpace.from_sizes([3])))


def measured(**given: Any) -> Any:
    return measure_layer_costs(Supernet(ChoiceBlock([torch.nn.Linear(2, 2)])), **given)


def consolidated(**given: Any) -> None:
    """Call `consolidate` with a folder that has no checkpoint, which is always an error."""
    consolidate(**{"folder": "no checkpoint", "file": "not written", **given})


NET = Supernet(ChoiceBlock([IDENTITY, IDENTITY]), ChoiceBlock([torch.nn.Linear(2, 2), IDENTITY]))
OF_SUPERNETS = [
    Door(ReproducibilityLog, {"every_n_batches": count}),
    Door(Uniform, {"space": never, "seed": integer}, {"space": SearchSpace.from_sizes([2])}),
    Door(SearchSpace.from_sizes, {"sizes": several(partial(count, most=2**20))}),
    Door(
        Evolution,
        {
            "space": never,
            "population": lambda v: count(v) and v >= 3,
            "parents": partial(count, most=50),
            "mutation": lambda v: number(v) and 0 <= v <= 1,
            "seed": integer,
        },
        {"space": SearchSpace.from_sizes([2]), "parents": 3},
    ),
    Door(
        FromList,
        {"subnets": several(lambda v: isinstance(v, list) and len(v) == 1 and v[0] in (0, 1)), "repeat": flag},
        {"subnets": [(0,), (1,)], "space": SearchSpace.from_sizes([2])},
        call_it={"subnets": "subnet"},
    ),
    Door(SubnetStream, {"explorer": never, "timeout": above_zero}, {"explorer": Uniform(SearchSpace.from_sizes([2]))}),
    Door(Subnet, {"choices": choices, "id": integer, "space": integer}, {"choices": (0, 1)}),
    Door(
        SearchSpace,
        {"blocks": several(lambda v: several(whole)(v) and v and len(set(v)) == len(v))},
        {"blocks": ((0, 1),)},
        call_it={"blocks": "block"},
    ),
    Door(
        SearchSpace.from_sizes([2]).restrict_to,
        {"candidates": lambda v: isinstance(v, dict) and not v},
        {"candidates": {}},
        call_it={"candidates": "block"},
    ),
    Door(
        SearchSpace.from_sizes([2]).check,
        {"choices": lambda v: choices(v) and [*v] == [1]},
        call_it={"choices": "subnet"},
    ),
    Door(
        FromIterable,
        {
            "subnets": lambda v: hasattr(v, "__iter__") and getattr(v, "ndim", 1) and not isinstance(v, type),
            "space": never,
        },
        {"space": SearchSpace.from_sizes([2]), "subnets": [(0,)]},
    ),
    Door(
        several_explorers,
        {"explorer": never},
        {"explorer": Uniform(SearchSpace.from_sizes([2]))},
        given_name="RoundRobin",
    ),
    Door(
        OptunaExplorer,
        {"space": never, "sampler": never, "population": count},
        {"space": SearchSpace.from_sizes([2]), "sampler": RandomSampler},
    ),
    Door(bulk_synchronous, {"layers": layers, "number": whole, "bulk": count}, {"layers": {}, "number": 0, "bulk": 1}),
    Door(ChoiceBlock, {"candidates": never}, {"candidates": [torch.nn.Identity()]}),
    Door(PerChoice, {"layer": never, "count": count_of_copies}, {"layer": IDENTITY, "count": 2}),
    Door(
        supernet,
        {
            "layer": never,
            "shared": lambda v: isinstance(v, str) and v in ("sequential", "frozen", "per_choice"),
            "delay": lambda v: v is None,
        },
        {"layer": IDENTITY},
        given_name="Supernet",
    ),
    Door(NET.layers_of, {"subnet": two_choices}),
    Door(NET.extract_subnet, {"subnet": two_choices}),
    Door(
        measured,
        {"x": lambda v: isinstance(v, torch.Tensor) and v.ndim, "repeats": lambda v: count(v, 1000)},
        {"x": torch.zeros(2, 2)},
        given_name="measure_layer_costs",
    ),
    Door(ExplorerFeedback, {"stream": never}, {"stream": SubnetStream(Uniform(SearchSpace.from_sizes([2])))}),
    Door(
        consolidated,
        {"folder": never, "file": lambda v: isinstance(v, Path | str), "weights_only": optional(flag)},
        given_name="consolidate",
    ),
    Door(
        SharedLayer,
        {"layer": never, "shared": lambda v: isinstance(v, str) and v == "delayed", "delay": count},
        {"layer": torch.nn.Identity(), "shared": "delayed", "delay": 3},
        given_name="Shared",
    ),
]


def checked(door: Door, given: dict[str, Any]) -> str:
    """Return a description of the problem if a door treated these arguments incorrectly, or an empty string."""
    senseless = [name for name, sense in door.sense.items() if name in given and not fits(door, sense, name, given)]
    shown = {name: short(given[name]) for name in given if name in door.sense}
    try:
        with deadline(60, (door.name, shown)):
            door.make(**given)
    except PipelineError as error:
        said = str(error)
        if senseless and not any(door.call_it.get(name, name) in said for name in senseless):
            return f"{door.name}({shown}) does not name {senseless}: {said}"
        if len(said) > 1200:
            return f"{door.name}({shown}) says too much: {said[:300]}"
        return "" if senseless or len(shown) > len(door.fine) or door.fine else f"{door.name}({shown}) refused: {said}"
    except Exception as error:
        return f"{door.name}({shown}) ends in {type(error).__name__}: {str(error)[:200]}"
    return f"{door.name}({shown}) is taken, and {senseless} make no sense" if senseless else ""


def fits(door: Door, sense: Callable[[Any], bool], name: str, given: dict[str, Any]) -> bool:
    """Return whether an argument makes sense for a door. The door's own default arguments always do."""
    return (name in door.fine and given[name] is door.fine[name]) or bool(sense(given[name]))


def short(value: object) -> str:
    """Return a short text for a value, even if its repr fails."""
    try:
        return repr(value)[:60]
    except ValueError:
        return f"<{type(value).__name__}>"


def wrong(seed: int, cases: int, doors: Sequence[Door] = DOORS) -> list[str]:
    """Return the problems of random arguments of random doors."""
    rng = random.Random(seed)
    found = (checked(door, perturbed(rng, door)) for door in (rng.choice(doors) for _ in range(cases)))
    return sorted({each for each in found if each})


def test_invalid_arguments_are_named_immediately():
    """Check that arguments that make no sense are named in an error, without much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = wrong(0, FEW) + wrong(0, FEW, OF_SUPERNETS)
    assert not found, "\n".join(found)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kibibytes more than before"


@pytest.mark.slow
def test_thirty_thousand():
    found = wrong(1, MANY) + wrong(1, MANY, OF_SUPERNETS)
    assert not found, "\n".join(found)
