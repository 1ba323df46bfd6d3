"""Exact search for the best scheme: labels per process, as in shortest paths with several resources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pipes.ir import check_number
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.strategies.umpipe.network import Scheme, Times
from lightning_pipes.strategies.umpipe.search.chain import (
    Chain,
    CutTables,
    SchemeSolution,
    chains_of_network,
    evaluate_genes,
)
from lightning_pipes.strategies.umpipe.search.greedy import choose_locally, descend_globally
from lightning_pipes.strategies.umpipe.search.kernel import CHUNK_KERNELS

BEAM_WIDTHS = (4, 32, 256, 2048)
"""The numbers of labels that are kept per process. A search that dropped no label has proven its result."""
SHARPENING_BEAM = 1
"""The index of the beam after which bounds are sharpened by suffixes."""
LABELS_PER_KEPT = 8
"""The number of labels made per kept label, before the labels with the worst bounds are dropped."""
MAX_LABEL_INTEGERS = 2**23
"""The maximum number of integers in the labels of a process that are made at once: 64 MiB."""
N_START_SCHEMES = 4
"""The number of the best equal schemes from which coordinate descent begins."""
MAX_SUFFIXES = 16
"""The maximum number of suffixes per process, which are used if small beams prove nothing. Others are merged."""
MAX_ELIMINATION_ROUNDS = 6
"""The maximum number of rounds. Each round tightens the bounds, which eliminates more options."""


def search_optimum(
    network: CutTables, seconds: float | None = None, gap: float = 0.0, beams: Sequence[int] = BEAM_WIDTHS
) -> SchemeSolution:
    """Return the best scheme with all forwards before all backwards.

    If the search stops early, the best scheme found so far is returned. Forward and backward wait for each other only
    at the barrier, so they are searched one after the other. A label consists of the times at which samples leave a
    process. A label is dropped if another label is nowhere later, because a later sample never makes a later process
    faster. For bounds and the elimination of options, see `kernel.bound_options`.

    The search begins with the best equal schemes and coordinate descent from them, so the result is never worse than
    GPipe's best scheme.

    Args:
        network: the times of all processes and options.
        seconds: the time limit, which is checked between two processes. Half of it is for each direction. None means
            that the search ends after the largest beam.
        gap: the share of the lower bound by which the result may be worse than the optimum.
        beams: the numbers of labels to keep, in ascending order. Pass the first few of `BEAM_WIDTHS` to limit the
            effort without a clock.

    Raises:
        InputError: the gap is negative or infinite.
    """
    check_number("gap", gap, "a share of 0 or more", lambda x: 0 <= x < math.inf)
    found = []
    parts = chains_of_network(network)
    begin = read_seconds()
    for number, chain in enumerate(parts):
        end = math.inf if seconds is None else begin + seconds * (number + 1) / len(parts)
        found.append(_Search(chain, gap, end).run(beams))
    forward, backward = (tuple(int(q) for q in each.genes) for each in found)
    return SchemeSolution(
        Scheme(forward, backward), sum(each.value for each in found), sum(each.lower_bound for each in found)
    )


@dataclass
class _Level:
    """The parents and the options of the labels after one process."""

    parents: Times
    options: Times


class _Search:
    """The search in one chain.

    Attributes:
        genes, value: the best scheme found so far.
        lower_bound: a lower bound for the value of all schemes.
        allowed: (process, option) whether the option may be part of a scheme whose value is below the limit.
        heads, rests: (process, sample) see `kernel.bound_options`.
        suffixes: for each process, the suffixes that begin there; see `sharpen_bounds`. Empty until then.
        sharpened: whether the small beams are done.
    """

    def __init__(self, chain: Chain, gap: float, end: float) -> None:
        self.chain, self.gap, self.end = chain, gap, end
        rows, processes = chain.rows, chain.processes
        self.loops = CHUNK_KERNELS.select(10 * processes * chain.options * rows).run
        self.allowed = np.ones((processes, chain.options), np.bool_)
        self.heads, self.rests = np.zeros((2, processes + 1, rows + 1), np.int64)
        self.suffixes: list[Times] = []
        self.sharpened = False
        self.lower_bound = 0
        ends = evaluate_genes(chain, chain.equal_schemes)
        starts = [chain.equal_schemes[q] for q in np.argsort(ends, kind="stable")[:N_START_SCHEMES]] + [
            choose_locally(chain)[0]
        ]
        self.genes, self.value = min((descend_globally(chain, genes) for genes in starts), key=lambda each: each[1])

    @property
    def target_bound(self) -> int:
        """The lower bound at which the remaining gap is small enough."""
        return math.ceil(self.value / (1 + self.gap))

    @property
    def limit(self) -> int:
        """The value below which the search looks for schemes.

        Small beams look for every better scheme. Large beams only look for schemes that are better by more than the
        gap.
        """
        return self.target_bound if self.sharpened else self.value

    @property
    def is_done(self) -> bool:
        """Whether the lower bound is high enough to end the search."""
        return self.lower_bound >= self.target_bound

    def run(self, beams: Sequence[int]) -> _Search:
        """Run the search with increasing beams, and return this object."""
        self.eliminate_options()
        for turn, beam in enumerate(beams):
            if self.is_done or read_seconds() > self.end:
                break
            self.extend_labels(beam)
            if not self.is_done:
                self.eliminate_options()
            if not self.is_done and turn == SHARPENING_BEAM:
                self.sharpen_bounds()
                self.sharpened = True
        return self

    def eliminate_options(self) -> None:
        """Disallow options that cannot improve the value, and raise the lower bound."""
        chain = self.chain
        for _ in range(MAX_ELIMINATION_ROUNDS):
            before = int(self.allowed.sum())
            low = self.loops.bound_options(
                chain.rows,
                chain.sizes,
                chain.times,
                self.allowed,
                self.limit,
                self.heads,
                self.rests,
                np.zeros(chain.rows + 1, np.int64),
            )
            self.lower_bound = max(self.lower_bound, int(low))
            if self.is_done or int(self.allowed.sum()) > 0.9 * before:
                break

    def sharpen_bounds(self) -> None:
        """Compute suffixes that bound labels more tightly than `rests`, and raise the lower bound.

        A suffix is the remaining time from each sample on. Every completion of a scheme takes at least as long as one
        of the suffixes of its process. If there are too many suffixes, they are divided into groups, and each group is
        replaced by its minimum, as in a relaxed decision diagram. A group has suffixes with a similar difference
        between the first and the last sample.
        """
        chain = self.chain
        rests = np.zeros((1, chain.rows + 1), np.int64)
        found = [rests]
        for k in range(chain.processes - 1, -1, -1):
            if read_seconds() > self.end:
                return
            options = np.flatnonzero(self.allowed[k])
            made = np.zeros((len(options) * len(rests) + 1, chain.rows + 1), np.int64)
            notes = np.zeros((2, len(made)), np.int64)
            count = self.loops.extend_suffixes(
                chain.rows, chain.sizes, chain.times[k], options, self.limit, self.heads[k], rests, made, notes
            )
            if not count:
                self.lower_bound = self.limit
                return
            kept = np.zeros(count, np.int64)
            kept = kept[
                : self.loops.select_undominated(made[:count], np.argsort(notes[0, :count], kind="stable"), kept)
            ]
            groups = np.array_split(kept[np.argsort(notes[1, kept], kind="stable")], min(MAX_SUFFIXES, len(kept)))
            rests = np.stack([made[group].min(axis=0) for group in groups])
            found.append(rests)
        self.suffixes = found[::-1]
        self.lower_bound = max(self.lower_bound, min(int(rests[:, 1].min()), self.limit))

    def extend_labels(self, beam: int) -> None:
        """Extend labels from the first process to the last, and keep at most `beam` labels per process."""
        chain, limit = self.chain, self.limit
        room = max(LABELS_PER_KEPT * beam, 2 * chain.options)
        marks = self.chunk_ends(0)
        labels = np.zeros((1, len(marks)), np.int64)
        history: list[_Level] = []
        dropped = limit  # the lowest bound of the dropped labels
        for k in range(chain.processes):
            if read_seconds() > self.end:
                return
            place = np.zeros(chain.rows + 1, np.int64)
            place[marks] = np.arange(len(marks))
            marks = self.chunk_ends(k + 1)
            labels, notes, low = self.grow_labels(k, labels, place, marks, limit, room)
            dropped = min(dropped, low)
            if not len(labels):
                break
            kept = np.zeros(len(labels), np.int64)
            kept = kept[: self.loops.select_undominated(labels, np.argsort(notes[3], kind="stable"), kept)]
            if len(kept) > beam:
                kept = kept[np.lexsort((notes[3, kept], notes[2, kept]))]
                dropped = min(dropped, int(notes[2, kept[beam]]))
                kept = kept[:beam]
            labels = np.ascontiguousarray(labels[kept])
            history.append(_Level(notes[0, kept], notes[1, kept]))
        else:
            last = int(labels[:, -1].argmin())
            self.value = int(labels[last, -1])
            self.genes = np.zeros(chain.processes, np.int64)
            for k in range(chain.processes - 1, -1, -1):
                self.genes[k], last = history[k].options[last], int(history[k].parents[last])
        self.lower_bound = max(self.lower_bound, min(dropped, self.value))

    def grow_labels(
        self, k: int, labels: Times, place: Times, marks: Times, limit: int, room: int
    ) -> tuple[Times, Times, int]:
        """Return the labels after process k, their notes, and the lowest bound of labels dropped for lack of room."""
        chain = self.chain
        options = np.flatnonzero(self.allowed[k])
        room = min(room, len(labels) * len(options), max(MAX_LABEL_INTEGERS // len(marks), 2 * len(options)))
        made = np.zeros((room, len(marks)), np.int64)
        notes = np.zeros((4, room), np.int64)
        rests = self.suffixes[k + 1] if self.suffixes else self.rests[k + 1 : k + 2]
        rests = np.ascontiguousarray(rests[:, marks])
        first = 0
        dropped = limit
        parts: list[tuple[Times, Times]] = []
        while first < len(labels):
            count, first = self.loops.extend_labels(
                chain.rows,
                chain.sizes,
                chain.times[k],
                options,
                limit,
                self.rests[k + 1],
                rests,
                place,
                marks,
                labels,
                first,
                made,
                notes,
            )
            parts.append((made[:count].copy(), notes[:, :count].copy()))
            if first < len(labels) or len(parts) > 1:
                together = np.concatenate([each[0] for each in parts]), np.concatenate([each[1] for each in parts], 1)
                best = np.lexsort((together[1][3], together[1][2]))
                if len(best) > room // 2:
                    dropped = min(dropped, int(together[1][2, best[room // 2]]))
                best = np.sort(best[: room // 2])
                parts = [(together[0][best], together[1][:, best])]
        return parts[0][0], parts[0][1], dropped

    def chunk_ends(self, k: int) -> Times:
        """Return the samples that end a chunk of any allowed option of process k.

        After the last process, this is only the last sample of the batch.
        """
        chain = self.chain
        if k == chain.processes:
            return np.array([chain.rows])
        ends = [np.arange(s, chain.rows + s, s).clip(None, chain.rows) for s in chain.sizes[self.allowed[k]]]
        return np.unique(np.concatenate(ends))
