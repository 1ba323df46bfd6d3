"""Check that all ranks of a pipeline load the same batches and select the same layers for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.data.batches import check_same, checksum_batch, sample_fingerprint
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import EvaluationWatcher, Step
from lightning_pipes.trainer.optimizers.optimizers import check_same_settings, settings_of
from lightning_pipes.trainer.ranks.control import PendingGather

N_CHECKED_BATCHES = 2
"""The number of batches at the start of every epoch, and of a run, whose checksums all ranks compare."""
DEVICE_CHECK_INTERVAL = 16
"""On a GPU, one of this number of batches gets a checksum, because the host must wait for the values."""


class SameBatch(EvaluationWatcher):
    """Compares the batches of all ranks, and the settings of their optimizers.

    The first batches are compared as a whole before they run. For each later batch, every rank compares a small
    checksum with the checksum of the last stage, which arrives with the result.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._trained = 0  # the number of training batches that have begun
        self._comparing = False

    def before_batch(self, step: Step) -> None:
        """Compare the first batches of all ranks.

        Raises:
            PipelineError: the batches differ. In training, it may be raised one batch later.
        """
        run = self._run
        before = len(run.windows)
        # Training counts batches, not windows. A window may hold any number of batches, and ranks would wait for each
        # other at each of them.
        if step.training:
            before = self._trained
            self._trained += 1
        self._comparing = min(step.batch_idx, before) < N_CHECKED_BATCHES and run.control.size > 1
        if not self._comparing:
            return
        settings = settings_of(run.trainer.optimizers) if step.training else {}
        found = run.control.start_all_gather((checksum_batch(step.batch), settings))
        check = partial(_check_same, found, run.control.ranks, f"{step.name}, batch {step.batch_idx}")
        if step.training:
            run.connections.check_later(found.has_arrived, check, max_turns=1)
        else:
            check()

    def around_batch(self, step: Step) -> None:
        """Compute the checksums of a batch, and compare the layers that the first batches use.

        On a GPU, most batches get no checksums.

        Raises:
            PipelineError: ranks select different layers for the batch.
        """
        control, use = self._run.control, step.use
        if control.size == 1:
            return
        if use is not None and self._comparing:
            self._check_layers(step, sorted(name for names in use.layers for name in names))
        if self._run.device.type == "cpu" or step.batch_idx % DEVICE_CHECK_INTERVAL == 0:
            step.mark = sample_fingerprint(step.batch), 0 if use is None else use.fingerprint

    def after_batch(self, step: Step) -> None:
        """Compare the checksums of this rank with the checksums of the last stage.

        Raises:
            PipelineError: the checksums differ.
        """
        own, last = step.mark, step.last_mark
        if own is not None and last is not None and own != last:
            self._refuse(own, last, f"{step.name}, batch {step.batch_idx}")

    def _refuse(self, own: tuple[int, int], last: tuple[int, int], where: str) -> None:
        run = self._run
        ranks = (run.global_ranks[run.local_layers.holdings.rank], run.last_rank)
        check_same([f"{mark[0]:08x}" for mark in (own, last)], ranks, where)
        raise _other_layers(where, [f"checksum {mark[1]:08x}" for mark in (own, last)], ranks)

    def _check_layers(self, step: Step, own: list[str]) -> None:
        control = self._run.control
        of_ranks = control.all_gather(own)
        if any(names != of_ranks[0] for names in of_ranks[1:]):
            common = set(of_ranks[0]).intersection(*of_ranks[1:])
            others = [[name for name in names if name not in common] for names in of_ranks]
            where = f"{step.name}, batch {step.batch_idx}"
            raise _other_layers(where, [", ".join(names[:5]) or "none" for names in others], control.ranks)


def _check_same(found: PendingGather[list[tuple[str, dict[str, str]]]], ranks: Sequence[int], where: str) -> None:
    batches, settings = zip(*found(), strict=True)
    check_same_settings(settings, ranks)
    check_same(batches, ranks, where)


def _other_layers(where: str, of_ranks: Sequence[str], ranks: Sequence[int]) -> PipelineError:
    listed = "; ".join(f"{layers} on rank {rank}" for layers, rank in zip(of_ranks, ranks, strict=True))
    return PipelineError(
        f"{where}: the ranks of one pipeline have the batch use different layers ({listed}), so that stages would be "
        "trained by different subnets. layers_of_batch must depend on the batch, or on numbers that are the same on "
        "all ranks: give explorers and spaces one seed"
    )
