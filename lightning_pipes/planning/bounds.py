"""Lower bounds of step times, computed without simulation.

Plans and partitions whose bound is too large need not be tried.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import Costs, Deployment, ModelProfile
from lightning_pipes.ir import SEND_KINDS, Kind, Plan, cost_classes
from lightning_pipes.planning.fit import both_seconds, stage_seconds
from lightning_pipes.planning.partition import Indices, Seconds, StageLoad, min_max_load, range_sums

Array = npt.NDArray[np.float64]


def least_step(plan: Plan, costs: Costs) -> int:
    """Return a lower bound of the nanoseconds of a step, for every order of `plan`.

    A micro-batch passes every stage and every link forward and then backward. A stage or link that processes all
    micro-batches can begin only when the first micro-batch has reached it. When it has finished, the last micro-batch
    must still complete the rest of its way. On steady links, 1F1B with a sufficiently long warm-up attains this bound
    (see `Deep`).

    Args:
        plan: the plan to bound.
        costs: the costs of its stages and links.

    Returns:
        Nanoseconds; 0 if the plan has several batches, several jobs, or several stages on a rank.
    """
    n = plan.n_stages
    if n != plan.n_ranks or len(plan.jobs) > 1 or plan.batches > 1:
        return 0
    gradient = Kind.I if plan.split_backward else Kind.B
    way = [(kind, s) for s in range(n) for kind in (Kind.F, Kind.SF)][:-1]
    way += [(kind, s) for s in reversed(range(n)) for kind in (gradient, Kind.SB)][:-1]
    every = {at: _sum_nanoseconds(*at, plan, costs) for at in way}
    before = dict(zip(way, accumulate((one for _, one in every.values()), initial=0), strict=False))
    after = dict(zip(reversed(way), accumulate((one for _, one in reversed(every.values())), initial=0), strict=False))
    found = [before[at] + every[at][0] + after[at] for at in way if at[0] in SEND_KINDS]
    for s in range(n):
        again = _sum_nanoseconds(Kind.R, s, plan, costs)[0] if Kind.R in plan.kinds_of_stage(s) else 0
        late = _sum_nanoseconds(Kind.W, s, plan, costs)[0] if plan.split_backward else after[gradient, s]
        found.append(before[Kind.F, s] + every[Kind.F, s][0] + again + every[gradient, s][0] + late)
    return max(found)


def _sum_nanoseconds(kind: Kind, stage: int, plan: Plan, costs: Costs) -> tuple[int, int]:
    """Return the nanoseconds of all instructions of one kind on a stage or link, and of the fastest one alone."""
    occupied, latencies, quickest = 0, [], []
    for i, count in cost_classes(kind, stage, plan):
        if kind in SEND_KINDS:
            takes, latency = costs.transfer_ns(i, plan)
            link = costs.link_between(plan.rank_of(i), plan.target_rank(i))
            takes = int(takes * link.peak_ratio) if link.burst_seconds else takes
        else:
            takes, latency = costs.duration_ns(i, plan) + costs.overhead_ns, 0
        occupied += count * takes
        latencies.append(latency)
        quickest.append(takes + latency)
    return occupied + min(latencies), min(quickest)


def step_bound(profile: ModelProfile, plan: Plan, deployment: Deployment) -> float:
    """Return a lower bound of the seconds of a step, for every partition and every order of `plan`.

    A rank computes all micro-batches on its stages. Before the first forward of a rank, a micro-batch must have passed
    all earlier stages; after the last backward of the rank, the gradients must pass these stages again. If the backward
    is split, the second wait is not counted, because W may be delayed. A rank ends with its STEP.

    Args:
        profile: the seconds and bytes of the layers.
        plan: the plan to bound. Its layers are ignored.
        deployment: the devices and links.

    Returns:
        Seconds; infinite if there are more stages than layers, and 0 if the stages cut the batch in different ways.
    """
    if len(profile.layers) < plan.n_stages:
        return float("inf")
    cut = plan.jobs[0]
    if len(cut.distinct_spans) > 1:
        return 0.0
    return _Bound(profile, plan, deployment).step_seconds()


class _Bound:
    def __init__(self, profile: ModelProfile, plan: Plan, deployment: Deployment) -> None:
        self.profile, self.plan, self.deployment = profile, plan, deployment
        spans = plan.spans(Kind.F, 0)
        sizes = [span.rows for span in spans]
        self.m, self.rows = len(sizes), max(sizes)
        # A smaller micro-batch takes at least its proportional share of the time of the largest micro-batch.
        self.work_share = sum(sizes) / (self.m * self.rows)
        self.one_share = min(sizes) / self.rows
        self.overhead = profile.overhead * (3 if plan.split_backward else 2)
        self.edge = min((profile.edge_bytes(cut) for cut in range(1, len(profile.layers))), default=0.0)
        self.speeds = [device.speed for device in deployment.pipeline.devices[: plan.n_ranks]]

    def step_seconds(self) -> float:
        one = self.plan.n_stages == self.plan.n_ranks
        return max(self._link_seconds(), self._one_stage_a_rank() if one else self._several_stages_a_rank())

    def _link_seconds(self) -> float:
        """Return the time for which the busiest link is occupied, if the smallest message passes at every cut.

        With one stage on each rank, the result also includes the way of a micro-batch to the link before its first
        message and the way back after its last message.
        """
        plan, cluster = self.plan, self.deployment.pipeline
        there = Counter((plan.ranks[s], plan.ranks[s + 1]) for s in range(plan.n_stages - 1) if plan.is_remote_edge(s))
        both = there + Counter({(b, a): n for (a, b), n in there.items()})
        size = self.rows * self.edge
        way = once = 0.0
        if plan.n_stages == plan.n_ranks:
            computing = self._pass_seconds(Kind.F)[-1] + self._pass_seconds(Kind.B, again=False)[-1]
            way = float(computing + self._hop_seconds()[-1] + self._hop_seconds(back=True)[-1])
            once = self.one_share  # the messages of one micro-batch are already part of `way`

        def busy(pair: tuple[int, int]) -> float:
            return cluster.link_between(*pair).least_send_seconds(size * (both[pair] * self.m * self.work_share - once))

        return max(map(busy, both), default=0.0) + way

    def _one_stage_a_rank(self) -> float:
        forward, back = self._pass_seconds(Kind.F), self._pass_seconds(Kind.B)
        hops, hops_back = self._hop_seconds(), self._hop_seconds(back=True)
        first = float(self._step(0)(np.array(0), np.array(1)))  # rank 0 has at least the first layer
        loads = stage_seconds(self.profile, self.plan, self.deployment.pipeline)

        def bounded(stage: int, rank: int, load: StageLoad) -> StageLoad:
            step, before, after = self._step(rank), forward + hops[stage], back + hops_back[stage]

            def least(begin: Indices, stop: Indices) -> Array:
                work = self.m * (load.seconds(begin, stop) * self.work_share + self.overhead)
                return np.asarray(work + before[begin])

            def seconds(begin: Indices, stop: Indices) -> Array:
                end = step(begin, stop)
                if stage and not self.plan.split_backward:
                    end = np.maximum(end, after[begin] + first)
                return least(begin, stop) + end

            return StageLoad(seconds, least)

        each = zip(self.plan.ranks, loads, strict=True)
        return min_max_load([bounded(s, rank, load) for s, (rank, load) in enumerate(each)], len(self.profile.layers))

    def _several_stages_a_rank(self) -> float:
        """Return a bound for plans with several stages on a rank.

        It is the larger of two values: the total work and waiting time of all ranks, divided among them by speed, and
        the work of the fullest rank, since a layer can't be divided. With recomputation, the result is the minimum over
        all sizes of the last stage, because this stage does not recompute. The other stages are counted with the
        smallest share of micro-batches that one of them recomputes.
        """
        n, plan = len(self.profile.layers), self.plan
        least = min(map(plan.recomputed_share, range(plan.n_stages - 1)), default=0.0)
        plain, again = (both_seconds(self.profile, plan, self.rows, share) for share in (0.0, least))
        ends = float(plain[0] + plain[-1])
        into, out = self._pass_seconds(Kind.F), self._pass_seconds(Kind.B)
        waits = sum(
            speed * float(into[stages[0]] + (0.0 if plan.split_backward else out[stages[0]]))
            for speed, stages in zip(self.speeds, plan.stages, strict=True)
        )

        overheads = self.overhead * sum(s * len(stages) for s, stages in zip(self.speeds, plan.stages, strict=True))

        def bound(last: int) -> float:
            each = np.concatenate([again[1 : n + 1 - last], plain[n + 1 - last : -1]])
            whole = self.m * ((float(each.sum()) + ends) * self.work_share + overheads)
            one = max(min_fullest_bin(each, plan.n_ranks), float(each[n - last :].sum()) if plan.recompute else 0.0)
            return max((whole + waits) / sum(self.speeds), self.m * one * self.work_share / max(self.speeds))

        return min(map(bound, range(1, n - plan.n_stages + 2) if plan.recompute else (n,)))

    def _pass_seconds(self, kind: Kind, again: bool = True) -> Array:
        """Return the seconds that a micro-batch takes through the first i layers on the fastest device, in entry i.

        If `again` is True and all stages but the last recompute every micro-batch, a backward includes the recomputed
        forward, unless it can run before the gradient arrives.
        """
        at = self.profile.layer_arrays.seconds_at
        seconds = at(Kind.F, self.rows)
        if kind is Kind.B:
            plan = self.plan
            every = bool(plan.recompute) and all(map(plan.recomputes_all, range(plan.n_stages - 1)))
            late = every and not plan.early_recompute
            twice = seconds if again and late else 0.0
            seconds = (at(Kind.I, self.rows) if self.plan.split_backward else at(Kind.B, self.rows)) + twice
        ends = np.concatenate([[0.0], np.cumsum(seconds[1:-1])])
        ends[1:] += seconds[0]
        return np.asarray(ends * self.one_share / max(self.speeds))

    def _hop_seconds(self, back: bool = False) -> Array:
        """Return the seconds of messages and overhead from the first stage to each stage, or back from each stage."""
        plan, found = self.plan, [0.0]
        for s in range(plan.n_stages - 1):
            seconds = self.profile.overhead
            if plan.is_remote_edge(s):
                pair = (plan.ranks[s + 1], plan.ranks[s]) if back else (plan.ranks[s], plan.ranks[s + 1])
                link = self.deployment.pipeline.link_between(*pair)
                seconds += link.least_send_seconds(self.edge * self.rows * self.one_share) + link.latency
            found.append(found[-1] + seconds)
        return np.array(found)

    def _step(self, rank: int) -> Seconds:
        """Return a function from the layers of a rank to the seconds of its STEP with the exposed all-reduce."""
        columns = self.profile.layer_arrays
        kind = Kind.W if self.plan.split_backward else Kind.B
        backward = range_sums(columns.seconds_at(kind, self.rows)[1:-1])
        averaged, step = range_sums(columns.layer_values("averaged")), range_sums(columns.layer_values("step"))
        speed = self.speeds[rank]

        def seconds(begin: Indices, stop: Indices) -> Array:
            left = self.deployment.exposed_seconds(
                rank, np.maximum(averaged(begin, stop), 0.0), backward(begin, stop) / speed
            )
            return np.asarray(step(begin, stop) / speed + left)

        return seconds


def min_fullest_bin(items: Array, bins: int) -> float:
    """Return a lower bound of the sum in the fullest bin if `items` are distributed over `bins` bins.

    For every k, one bin contains at least k + 1 of the k * bins + 1 largest items.
    """
    sizes = np.sort(items)[::-1]
    return max(float(sizes[k * bins - k : k * bins + 1].sum()) for k in range(-(-len(sizes) // bins)))
