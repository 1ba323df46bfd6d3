"""Compare the choice of schedule, micro-batches and recomputation with a search through all options."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from itertools import product

import numpy as np
import pytest

from lightning_pipes.cost import Cluster, Deployment, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.cost.cluster import make_cluster
from lightning_pipes.cost.zoo import named_profile
from lightning_pipes.ir import Plan, PlanError, Program
from lightning_pipes.ir import plan as plans
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.auto import choice as options
from lightning_pipes.planning.auto import choose_option, search
from lightning_pipes.planning.bounds import step_bound
from lightning_pipes.planning.fit import evaluate_plan, fit_layers
from lightning_pipes.planning.planner import Problem, even_plan, solve_plan
from lightning_pipes.planning.staleness import Iterations
from lightning_pipes.testing.generators import PlanningProblem, every_fit, random_problem
from tests.planning.samples import equal_layers


@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_trying_everything(seed):
    p = random_problem(seed)
    choice = choose_option(p.profile, p.ranks, p.rows, p.cluster)
    assert choice.fit.seconds <= 1.02 * min(fit.seconds for fit in every_fit(p))
    assert all(peak <= device.memory for peak, device in zip(choice.fit.peak_bytes, p.cluster.devices, strict=True))


def test_partitions_of_equal_weight_are_distinguished():
    """Check a case in which several partitions have the same weight but different step times.

    There are eight equal layers on four ranks, one of which is slow. With any cut, some stage takes as long as three
    layers. With kfkb on slow links, the position of this stage changes the step by one fifth.
    """
    tables = {"forward": ((1, 2e-3), (16, 17e-3)), "backward": ((1, 4e-3), (16, 34e-3))}
    profile = ModelProfile((LayerProfile("", **tables, output=((1, 1e5),)),) * 8)
    devices = tuple(Device(speed=2 / 3 if rank == 1 else 1.0) for rank in range(4))
    problem = PlanningProblem(profile, 4, 16, Cluster(devices, inside=Link(bandwidth=1e5 / 4e-3)))
    choice = choose_option(*problem)
    assert choice.fit.seconds == min(fit.seconds for fit in every_fit(problem))
    schedule = make_schedule("kfkb", k=2)
    fit = fit_layers(profile, schedule, even_plan(schedule, 4, 8, 16), problem.cluster, trials=0)
    assert fit.cuts == [3, 4, 6]


def test_stale_gradients_are_weighed_against_faster_batches():
    """Check that T(S) W(S) is the smallest of all options.

    Exact gradients win if T rises fast enough with the staleness.
    """
    profile, cluster = equal_layers(12), Cluster((Device(),) * 4)
    exact = choose_option(profile, 4, 16, cluster, recompute=[False])
    assert exact.best.schedule.flushes
    chosen = []
    for penalty in (0.0, 0.003, 0.012, 0.05):
        iterations = Iterations(100.0, penalty)
        choice = choose_option(profile, 4, 16, cluster, recompute=[False], iterations=iterations)
        every = [exact.fit.seconds * iterations(1)]
        for name, m in product(("pipedream", "pipedream_2bw"), (1, 2, 4, 8, 16)):
            if name == "pipedream_2bw" and m < 4:
                continue
            schedule = make_schedule(name)
            stages = 1 + -(-3 // m) if name == "pipedream" else 2  # weight versions on the first stage
            fit = fit_layers(profile, schedule, solve_plan(Problem(schedule, 4, 16, m)), cluster)
            every.append(iterations(stages) * fit.seconds)
        assert choice.best.seconds * iterations(1) == pytest.approx(min(every))
        assert ("stale gradients" in str(choice).splitlines()[1]) is not choice.best.schedule.flushes
        chosen.append((choice.best.schedule.name, choice.best.microbatches))
    assert chosen[0][0] == chosen[1][0] == "pipedream"
    assert chosen[1][1] >= 3  # fewer micro-batches have older gradients
    assert chosen[-1][0] == exact.best.schedule.name
    never = choose_option(profile, 4, 16, cluster, iterations=Iterations(1.0, 0.2))
    assert any("never reaches the target" in option.why_not for option in never.options)


def test_table_has_reasons():
    model, ranks, rows, cluster = random_problem(3)
    choice = choose_option(model, ranks, rows, cluster)
    text = str(choice)
    assert ["chosen" in line for line in text.splitlines()].index(True) == 1
    assert text.count("chosen") == 1
    assert choice.best.label.split()[0] in text.splitlines()[1]
    refused = [option.why_not for option in choice.options if option.fit is None]
    assert any("can't beat the best: at least" in why for why in refused)
    assert all(option.bound <= option.fit.seconds * (1 + 1e-9) for option in choice.options if option.fit)


def test_nothing_fits():
    model, ranks, rows, _ = random_problem(3)
    poor = Cluster.from_counts(1, ranks, 1000)
    with pytest.raises(PlanError, match=r"no schedule fits: stage .* needs .* MiB and has 0.0 MiB"):
        choose_option(model, ranks, rows, poor)


@pytest.mark.parametrize("between", ["25GB/s", pytest.param("200MB/s", marks=pytest.mark.slow)])
def test_64_stages_512_microbatches_16_replicas(between):
    """Check that only a few of more than 100 options are simulated.

    The file benchmarks/scaling.py measures the time of this search.
    """
    profile = named_profile("GPT-2-1.3B", "A100-80G")
    cluster = make_cluster(
        128, 8, "74GiB", {"bandwidth": "300GB/s", "latency": "5us"}, {"bandwidth": between, "latency": "10us"}
    )
    place = Deployment.from_cluster(cluster, 64, 16)
    choice = choose_option(profile, 64, 512, place)
    assert len(choice.options) > 100
    assert sum(option.fit is not None for option in choice.options) < 30
    assert choice.best.bound <= choice.fit.seconds * (1 + 1e-6)
    order = choice.fit.order
    alone = evaluate_plan(profile, order, choice.fit.plan, place.pipeline).seconds
    whole = max(
        float(place.all_reduce_seconds(rank, np.array(2.0 * size)))  # gradients in half precision are sent as float32
        for rank, size in enumerate(profile.layer_arrays.stage_sums("gradients", choice.fit.plan.layers))
    )
    assert alone < choice.fit.seconds <= alone + whole


def test_progress_goes_forward():
    rng = np.random.default_rng(0)
    base, _, _, _ = random_problem(1)
    layers = tuple(base.layers[int(n)] for n in rng.integers(0, len(base.layers), 48))
    told: list[float] = []
    choose_option(
        ModelProfile(layers),
        8,
        64,
        Cluster.from_counts(2, 4, inside=Link(1e9), between=Link(1e8)),
        progress=lambda what, done: told.append(done),
    )
    assert told == sorted(told)


def test_warm_ups_for_links_that_are_slow():
    """Check that the search finds a warm-up for the only slow link.

    Schedules that depend only on the numbers of ranks and micro-batches cannot have it.
    """
    layer = LayerProfile(
        "layer", ((1, 9.4e-3),), ((1, 18.8e-3),), ((1, 9.4e-3),), ((1, 9.4e-3),), gradient_bytes=1, saved=((1, 1.0),)
    )
    far = {(2, 3): Link(latency=0.06), (3, 2): Link(latency=0.06)}
    cluster = Cluster((Device(8),) * 4, links=far)
    found = choose_option(ModelProfile((layer,) * 4), 4, 16, cluster, microbatches=[16], recompute=[False])
    assert found.best.plan.split_backward
    plain = [o.fit.seconds for o in found.options if o.fit and o.label != found.best.label]
    assert found.fit.seconds < 0.97 * min(plain)
    assert max(found.fit.peak_bytes) <= 8


def test_a_variant_that_is_too_large_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the limit on the size of an order with four ranks and 32 micro-batches.

    The real limit applies to sizes such as 256 ranks and 512 micro-batches.
    """
    for module in (plans, options, search):
        monkeypatch.setattr(module, "MAX_FORWARDS", 128)
    choice = choose_option(equal_layers(24), 4, 128, recompute=[False])
    assert choice.best.microbatches <= 32
    large = [option for option in choice.options if option.too_large]
    assert {option.label for option in large} >= {"hanayo waves=1", "interleaved stages_per_rank=2"}
    assert all(option.fit is None and option.why_not for option in large)
    text = str(choice)
    assert "Not searched: 33 to 128 micro-batches; an order has at most 128 forwards on all stages" in text
    assert "Not searched, because the plan is too large with this number of micro-batches: " in text
    assert "hanayo waves=1 (32)" in text


def test_limited_search_lists_options_that_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LARGE_STEP_FORWARDS", 10)
    monkeypatch.setattr(search, "MAX_SIMULATED_FORWARDS", 100)
    monkeypatch.setattr(search, "RELATED_TIME_RATIO", np.inf)
    choice = choose_option(
        equal_layers(24),
        4,
        16,
        microbatches=[16],
        schedules=[make_schedule(name) for name in ("1f1b", "gpipe", "deep")],
    )
    assert sum(option.fit is not None for option in choice.options) == 1
    left = [option for option in choice.options if option.too_large]
    assert [option.why_not for option in left] == [
        "too many: the search has simulated 64 forwards, and stops there"
    ] * 2
    assert "name a schedule, or use fewer micro-batches or fewer ranks" in str(choice)


def test_nothing_fits_and_not_all_was_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MAX_FORWARDS", 16)
    monkeypatch.setattr(search, "MAX_FORWARDS", 16)
    with pytest.raises(PlanError, match=r"no schedule fits: .* Not searched: 5 to 16 micro-batches; .* fewer ranks"):
        choose_option(equal_layers(24), 4, 16, Cluster((Device(1000),) * 4))


def test_orders_are_kept_only_where_they_may_be_improved() -> None:
    """Check that only a few orders are stored.

    The order of a large plan takes a hundred megabytes. All other orders are made again on access.
    """
    choice = choose_option(equal_layers(66), 33, 132, microbatches=[66, 132])
    fits = [option.fit for option in choice.options if option.fit is not None]
    assert len(fits) > search.MAX_REFINED_OPTIONS
    assert sum(isinstance(fit.given, Program) for fit in fits) <= search.MAX_REFINED_OPTIONS
    for fit in fits:
        alone = evaluate_plan(equal_layers(66), fit.order, fit.plan, Cluster((Device(),) * 33))
        assert alone.seconds == fit.seconds


def test_memory_of_a_bound_does_not_grow_with_stages_times_layers_squared() -> None:
    """Check the memory of the bound for 1282 layers and 256 stages.

    All pairs of layers for each stage would take 3.4 GB.
    """
    plan, profile, place = Plan.even(256, 64), equal_layers(1282), Deployment(Cluster((Device(),) * 256))
    tracemalloc.start()
    try:
        assert step_bound(profile, plan, place) > 0
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


A_THOUSAND = """
import resource, time
from lightning_pipes.cost.cluster import make_cluster
from lightning_pipes.planning.auto import choose_option
from tests.planning.samples import equal_layers

began = time.process_time()
cluster = make_cluster(125, 8, "40GiB", {"bandwidth": "300GB/s"}, {"bandwidth": "25GB/s", "latency": "10us"})
choice = choose_option(equal_layers(1282), 1000, 10_000, cluster)
assert choice.fit.seconds > 0
assert any("263 to 10000 micro-batches" in said for said in choice.not_searched), choice.not_searched
seconds, size = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
assert size < 2, f"{size:.2f} GiB"
assert seconds < 900, f"{seconds:.0f} s"  # 60 where nothing else runs
"""


@pytest.mark.slow
def test_a_thousand_ranks() -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    subprocess.run([sys.executable, "-c", A_THOUSAND], cwd=root, check=True, timeout=3600)
