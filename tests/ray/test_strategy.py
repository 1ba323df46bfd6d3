"""Check training in the workers of Ray Train against training in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_pipes import PipelineStrategy, consolidate
from lightning_pipes.ir import InputError

pytest.importorskip("ray", reason="Ray is not installed: pip install lightning-pipes[ray]")

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from lightning_pipes.ray import RayPipelineStrategy, prepare_trainer
from tests.ray.training import fit, train_loop, weights
from tests.trainers import make_trainer


def assert_equal(one, other) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.slow
def test_workers_of_ray_train_equal_one_process(cluster: Path) -> None:
    """Check the weights, the reported metrics, and the checkpoints that Ray Train has kept."""
    trainer = TorchTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="equal", storage_path=str(cluster / "results")),
    )
    result = trainer.fit()
    alone = fit()
    expected = weights(alone)
    assert_equal(result.return_value["full"], expected)
    assert_equal(result.return_value["sharded"], expected)
    assert_equal(result.return_value["resumed"], weights(fit(max_epochs=3)))
    assert result.metrics["val_loss"] == float(alone.callback_metrics["val_loss"])
    assert result.metrics["step"] == alone.global_step
    kept = [Path(checkpoint.path) / "checkpoint.ckpt" for checkpoint, _ in result.best_checkpoints]
    assert len(kept) == 4
    full = torch.load(kept[1], weights_only=False)["state_dict"]
    assert_equal({name: value.numpy() for name, value in full.items()}, expected)
    consolidate(kept[3], cluster / "whole.ckpt")
    whole = torch.load(cluster / "whole.ckpt", weights_only=False)["state_dict"]
    assert_equal({name: value.numpy() for name, value in whole.items()}, expected)


def test_strategies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"in processes that Ray has started.*not one of them.*TorchTrainer"):
        make_trainer(devices="auto", strategy=RayPipelineStrategy())
    with pytest.raises(InputError, match=r"use lightning_pipes\.ray\.RayPipelineStrategy with the same arguments"):
        prepare_trainer(make_trainer(strategy=PipelineStrategy()))
    with pytest.raises(RuntimeError, match="RayDDPStrategy"):  # from Ray
        prepare_trainer(make_trainer(devices=1))
