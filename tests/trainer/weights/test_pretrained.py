"""Tests of loading and exporting safetensors files, compared with transformers and with one process.

Modules are on the meta device before their weights are loaded.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy, export_weights, load_pretrained
from lightning_pipes.ir import InputError, PipelineError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.weights.deferred import DeferredWeights, group_layers, group_owners
from lightning_pipes.trainer.weights.pretrained import PretrainedWeights, reads_later
from tests.trainer.lit import quiet

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
KINDS = ("llama", "tied", "mixtral", "gpt2")


def config(kind: str) -> Any:
    if kind == "mixtral":
        return transformers.MixtralConfig(**SIZES, num_local_experts=3, tie_word_embeddings=False)
    if kind == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
        drops = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        return transformers.GPT2Config(**sizes, **drops, bos_token_id=1, eos_token_id=2)
    return transformers.LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied")


def save(kind: str, folder: Path) -> Path:
    """Save a model with random weights and return the folder."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config(kind)).save_pretrained(folder, max_shard_size="8KB")
    return folder


def make_on_meta(kind: str) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config(kind))


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_reads_what_from_pretrained_reads(kind, tmp_path):
    folder = save(kind, tmp_path / kind)
    model = make_on_meta(kind)
    load_pretrained(model, folder)
    expected = state(transformers.AutoModelForCausalLM.from_pretrained(folder))
    assert state(model).keys() == expected.keys()
    for name, value in state(model).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_the_keys_of_its_layers(kind, tmp_path, monkeypatch):
    folder = save(kind, tmp_path / kind)
    model = make_on_meta(kind)
    read: list[str] = []
    original = PretrainedWeights._read
    monkeypatch.setattr(PretrainedWeights, "_read", lambda self, key: (read.append(key), original(self, key))[1])
    weights = PretrainedWeights(model, folder)
    expected = state(transformers.AutoModelForCausalLM.from_pretrained(folder))
    own = [
        (n, p)
        for n, p in model.named_parameters()
        if any(f"{part}.{i}." in n for part in ("layers", "h") for i in (1, 3))
    ]
    for _, tensor in own:
        torch.utils.swap_tensors(tensor, nn.Parameter(torch.empty_like(tensor, device="cpu")))
    weights.fill([tensor for _, tensor in own])
    for name, tensor in own:
        assert torch.equal(tensor, expected[name]), name
    assert read
    assert all(".1." in key or ".3." in key for key in read)
    assert len(read) == len(set(read))


def initialize(kind: str, by_units: bool, wanted: str = "") -> dict[str, torch.Tensor]:
    """Return the weights of a rank that holds the tensors with `wanted` in their names, initialized without files."""
    module = pl.LightningModule()
    module.net = make_on_meta(kind)
    layers = "net.transformer.h" if kind == "gpt2" else "net.model.layers"
    deferred = DeferredWeights(module, group_owners(module) if by_units else group_layers(module, layers))
    here = {id(t) for name, t in state(module).items() if wanted in name}
    pipe: Any = SimpleNamespace(broadcast=lambda value, source: value, broadcast_tensor=lambda *_: None, ranks=[0] * 9)
    ranks: Any = SimpleNamespace(pipeline=pipe, control=pipe, device=torch.device("cpu"))
    if by_units:
        deferred.make_tensors(lambda t: id(t) in here, 0, ranks)
    else:
        deferred.make_layers(range(4), range(4), 0, ranks)
    return {name: t.detach() for name, t in state(module.net).items() if not t.is_meta}


@pytest.mark.parametrize("by_units", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_without_files_start_as_in_one_process(kind, by_units):
    torch.manual_seed(0)
    expected, found = state(transformers.AutoModelForCausalLM.from_config(config(kind))), initialize(kind, by_units)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.numel() >= 256:
            assert float(found[name].std()) == pytest.approx(float(value.std()), rel=0.25), name
        elif not value.is_floating_point() or value.unique().numel() == 1:
            assert torch.equal(found[name], value), name


def test_weights_that_start_with_random_numbers_do_not_depend_on_the_cut():
    whole, part = initialize("gpt2", True), initialize("gpt2", True, "mlp.c_proj")
    assert len(part) == 8
    assert all(torch.equal(value, whole[name]) for name, value in part.items())


class Lit(pl.LightningModule):
    def __init__(self, folder: str, whole: bool) -> None:
        super().__init__()
        self.net: Any = None
        self.folder, self.whole = folder, whole

    def configure_model(self) -> None:
        if self.net is not None:
            return
        if self.whole:
            self.net = transformers.AutoModelForCausalLM.from_pretrained(self.folder).train()
        else:
            with torch.device("meta"):
                found = transformers.AutoConfig.from_pretrained(self.folder)
                self.net = transformers.AutoModelForCausalLM.from_config(found)
            load_pretrained(self.net, self.folder)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(rank: int, folder: str, ranks: int) -> dict[str, Any]:
    """Train for one epoch and return the weights. With 0 ranks, train in plain Lightning."""
    quiet()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(1)
    batches = DataLoader(torch.randint(0, 64, (12, 8)), batch_size=4)  # type: ignore[arg-type]
    strategy = PipelineStrategy("1f1b", microbatches=2, checkpoint="sharded", gather="all") if ranks else "auto"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=max(ranks, 1),
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Lit(folder, whole=not ranks)
    trainer.fit(module, batches)
    if ranks:
        trainer.save_checkpoint(Path(folder) / "trained")
    return {name: value.detach().numpy() for name, value in state(module.net).items()}


@pytest.mark.parametrize("kind", ["tied", "gpt2"])
def test_two_ranks_train_as_one_process_and_write_what_from_pretrained_reads(kind, tmp_path):
    folder = save(kind, tmp_path / kind)
    expected = run_ranks(trained, 1, str(folder), 0, timeout=90)[0]
    for found in run_ranks(trained, 2, str(folder), 2, timeout=90):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert abs(value - expected[name]).max() < 1e-10, name
    export_weights(folder / "trained", tmp_path / "out", prefix="net", model=make_on_meta(kind), max_file_bytes=20_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    for name, value in state(again).items():
        if not name.endswith("inv_freq"):  # transformers computes it in float32
            assert abs(value.detach().numpy() - expected[name]).max() < 1e-10, name


def test_exported_experts_equal_save_pretrained(tmp_path):
    folder = save("mixtral", tmp_path / "mixtral")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.save(
        {"state_dict": {f"net.{name}": value for name, value in whole.state_dict().items()}}, tmp_path / "a.ckpt"
    )
    export_weights(tmp_path / "a.ckpt", tmp_path / "out", prefix="net", model=make_on_meta("mixtral"))
    assert {key: value.shape for key, value in load_file(tmp_path / "out" / "model.safetensors").items()} == {
        key: tuple(handle.get_slice(key).get_shape())
        for file in folder.glob("*.safetensors")
        for handle in [safe_open(file, "pt")]
        for key in list(handle.keys())
    }
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones(2), persistent=False)


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(2)
    net = Net()
    nn.init.normal_(net.layers[1].running_mean)
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def test_plain_modules_have_the_names_of_their_state_dict(file):
    with torch.device("meta"):
        net = Net().layers
    save_file({k.removeprefix("layers."): v for k, v in load_file(file).items()}, file.with_name("part.safetensors"))
    load_pretrained(net, file.with_name("part.safetensors"))
    for name, value in net.state_dict().items():
        assert torch.equal(value, load_file(file)[f"layers.{name}"]), name


def test_values_that_are_in_no_file_need_a_way_to_be_made(file):
    module = pl.LightningModule()
    with torch.device("meta"):
        module.net = Scaled()
    with pytest.raises(InputError, match=r"Scaled is a Scaled with weights on meta and has no reset_parameters\(\)"):
        load_pretrained(module.net, file)
    with reads_later():
        load_pretrained(module.net, file)
    with pytest.raises(PipelineError, match=r"net is a Scaled with weights on meta and has no reset_parameters\(\)"):
        DeferredWeights(module, group_layers(module, "net.layers"))


def test_a_missing_value_is_named_and_initialized_where_that_is_asked_for(file):
    values = load_file(file)
    del values["layers.2.bias"]
    save_file({**values, "head.weight": torch.ones(1)}, file)
    with pytest.raises(InputError, match=r"has no value for layers\.2\.bias, and has head\.weight, which Net does not"):
        load_pretrained(on_meta(), file)
    net = on_meta()
    load_pretrained(net, file, strict=False)
    assert torch.equal(net.layers[2].weight, values["layers.2.weight"])
    assert net.layers[2].bias.abs().max() <= 0.5


def test_another_shape_is_named(file):
    values = load_file(file)
    save_file({**values, "layers.0.bias": torch.ones(5)}, file)
    with pytest.raises(InputError, match=r"has layers\.0\.bias of shape \(5,\), and Net needs \(4,\)"):
        load_pretrained(on_meta(), file)


def test_a_module_that_has_values_is_refused(file):
    net = on_meta()
    net.layers[0] = nn.Linear(3, 4)
    with pytest.raises(InputError, match=r"layers\.0\.weight, layers\.0\.bias of Net is not there"):
        load_pretrained(net, file)


@pytest.mark.parametrize("name", ["../net.safetensors", "other.safetensors"])
def test_an_index_names_files_of_its_folder(name, file, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    table = {"weight_map": {"layers.0.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises(InputError, match=r"outside of that folder|which is not there"):
        load_pretrained(on_meta(), folder)


def test_a_file_that_ends_early_is_named(file):
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(InputError, match=rf"{file} is not a whole safetensors file .* copy or write it again"):
        load_pretrained(on_meta(), file)


def test_there_must_be_a_file(tmp_path):
    with pytest.raises(InputError, match="has none; name the folder that save_pretrained has written"):
        load_pretrained(on_meta(), tmp_path)


def test_export_names_the_parts_that_there_are(file, tmp_path):
    torch.save({"state_dict": {f"net.{name}": value for name, value in load_file(file).items()}}, tmp_path / "a.ckpt")
    with pytest.raises(
        InputError, match=r"has a name that begins with 'model\.'.* names of the weights, which begin with net"
    ):
        export_weights(tmp_path / "a.ckpt", tmp_path / "out", prefix="model")
    assert not (tmp_path / "out").exists()
    export_weights(tmp_path / "a.ckpt", tmp_path / "out", prefix="net")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == load_file(file).keys()
    assert all(torch.equal(value, load_file(file)[name]) for name, value in written.items())
