"""Tests for `lightning-pipes stages`."""

from __future__ import annotations

import pytest

from tests.tune.cli.calls import Say, found, refused


class TestStages:
    MODEL = ("stages", "model=BERT-48", "device=A100-40G", "ranks=8", "batch=32")

    def test_few_batches_want_many_stages_and_staleness_few(self, say: Say) -> None:
        """Check that the fastest number of stages is chosen, and a smaller one if staleness requires more batches."""
        alone, stale = found(say, *self.MODEL), found(say, *self.MODEL, "--batches", "1:196,4:1960")
        by_stages = {each["stages"]: each for each in alone["options"]}
        timed = [n for n, each in by_stages.items() if each["seconds"] is not None]
        assert alone["stages"] == min(timed, key=lambda n: by_stages[n]["seconds_a_batch"])
        assert stale["stages"] < alone["stages"]
        assert f"data_parallel={8 // stale['stages']}" in stale["strategy"]

    def test_stages_with_different_numbers_of_ranks_can_run(self, say: Say) -> None:
        model = ("stages", "model=BERT-48", "device=A100-40G", "ranks=3", "batch=32", "bandwidth=1GB/s")
        three = found(say, *model, "--batches", "1:196,3:1960")
        devices = three["options"][1]["devices"]
        assert devices == [[1, 1], [2, 1]], "the first layers have most weights"
        assert "data_parallel=[1, 2]" in three["strategy"]

    def test_shards_alike_on_all_stages_can_run(self, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
        """Check that devices can hold shards of stages if whole stages do not fit."""
        model = ("model=BERT-48", "device=A100-40G", "ranks=4", "batch=4", "memory=4GiB")
        assert "4: no distribution of layers" in refused(capsys, "stages", *model)
        sharded = found(say, "stages", *model, "--sharded")
        assert [each["devices"] for each in sharded["options"]] == [[[1, 4]], [[1, 2], [1, 2]], None]
        assert sharded["strategy"] == 'PipelineStrategy("dynpipe", tensor_parallel=4)'

    def test_versions_of_weights_fit_only_with_memory_swap(self, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
        """Check that four stages fit only with MemorySwap.

        The first of four stages keeps 4 versions of its weights, or 2 of them and the others on the host.
        """
        model = ("model=BERT-48", "device=A100-40G", "ranks=4", "batch=4", "memory=4700MiB")
        assert "4: no distribution of layers" in refused(capsys, "stages", *model)
        assert found(say, "stages", *model, "--cached")["stages"] == 4
        assert "MemorySwap(device_bytes=" in say("stages", *model, "--cached")

    def test_theory_ends_where_staleness_never_reaches_the_target(self, say: Say) -> None:
        """Check that too many stages get no number of batches, because their stale gradients never reach the target."""
        theory = "loss=10,lipschitz=60,noise=0.04,lr=0.01,target=0.1"
        options = found(say, *self.MODEL, "--theory", theory)["options"]
        assert options[-1]["batches"] is None
        assert options[0]["batches"] == pytest.approx(28090, abs=1)
        assert "training never reaches the target with gradients this stale" in say(*self.MODEL, "--theory", theory)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["ranks=4"], "stages needs layers: profile=FILE"),
            (["model=BERT-48", "--batches", "3"], "--batches '3': give stages:batches pairs"),
            (["model=BERT-48", "--theory", "loss=1"], "--theory 'loss=1': give loss, lipschitz"),
            (["model=BERT-48", "microbatches=[2,4]"], "microbatches=[2, 4]: stages takes one number"),
            (["model=BERT-48", "--batches", "1:2"], "T(S) is fitted to the batches of runs with at least two numbers"),
        ],
    )
    def test_mistakes(self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert refused(capsys, "stages", *arguments).startswith(said)
