"""LightningModules of rows about the structure of a model: lists of layers, and models of other libraries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.lit import WIDTH, Lit, data, differences, plain_values
from tests.trainer.replicas import REPLICAS, ROWS, Dealt

TOKENS = 11
CLASSES = 3


class Mixing(nn.Module):
    """A layer with several arguments: a mask for all samples, values for each sample, and a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h: Any, mask: Any, *, gates: tuple[Any, Any], scale: float, nothing: None = None) -> Any:
        assert nothing is None
        assert mask.shape == (WIDTH, WIDTH)
        opened, shift = gates
        return h + scale * opened * torch.tanh(self.linear(self.norm(h)) @ mask) + shift


class LitList(Lit):
    """A module that runs a list of layers in a loop, between other parameters.

    These parameters get gradients through the arguments of all layers.
    """

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.layers = nn.ModuleList(Mixing() for _ in range(5))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        # The mask has the length of the last batch, but must not be split: it is the same for all samples.
        mask = torch.ones(WIDTH, WIDTH, dtype=x.dtype).tril()
        gates = torch.sigmoid(self.gate(x)), self.shift
        for layer in self.layers:
            h = layer(h, mask, gates=gates, scale=0.5)
        return self.outlet(h)


class LitIndexed(LitList):
    """A module that passes different arguments to each layer, and runs its layers in two loops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        mask = torch.ones(WIDTH, WIDTH, dtype=x.dtype)
        assert len(self.layers) == 5
        assert isinstance(self.layers, nn.ModuleList)
        for n, layer in enumerate(self.layers[:2]):
            assert isinstance(layer, Mixing)
            h = layer(h, mask, gates=(1.0, self.shift * n), scale=n + 1.0)
        for n in range(2, 5):
            h = self.layers[n](h, mask * n, gates=(0.5, 0.0), scale=0.1)
        return self.outlet(h)


class Attending(nn.Module):
    """A layer that returns its output and a bias, which only the first layer creates, as in T5."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.full((1, WIDTH), 0.2)) if first else None

    def forward(self, h: Any, bias: Any = None) -> Any:
        bias = self.bias if bias is None else bias
        return torch.tanh(self.linear(h) + bias), bias


class LitUnpacked(LitList):
    """A module whose layers return tuples, and whose loop has skips from the first layers to later ones."""

    def __init__(self) -> None:
        super().__init__()
        del self.gate
        self.layers = nn.ModuleList(Attending(n == 0) for n in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, bias = self.inlet(x), None
        skips: list[Any] = []
        for n, layer in enumerate(self.layers):
            if n < 2:
                h, bias = layer(h, bias)
                skips.append(h)
            elif n < 4:
                out = layer(h, skips.pop())
                h = out[0] if isinstance(out, tuple) else out
            else:
                h = layer(h, bias=bias)[0]
        return self.outlet(h * self.shift)


class LitBetween(LitList):
    """A module that applies the same operation after each layer, in its own code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        for layer in self.layers:
            h = F.relu(layer(h, torch.eye(WIDTH, dtype=x.dtype), gates=(1.0, self.shift), scale=0.5))
        return self.outlet(h)


class LitCompiledList(LitList):
    """A module with a list of layers that are compiled by `torch.compile` or by `layer.compile`.

    The backend "eager" needs no compiler.
    """

    def configure_model(self) -> None:
        for n, layer in enumerate(self.layers):
            if n % 2:
                layer.compile(backend="eager")
            elif isinstance(layer, Mixing):
                self.layers[n] = torch.compile(layer, backend="eager")


class LitCompiledWhole(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model, backend="eager")


class Down(nn.Module):
    """A layer that halves the width, and passes on its input for the layer that widens it again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width // 2)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x = state["x"]
        return {"x": torch.tanh(self.linear(x)), "skips": [*state["skips"], x]}


class Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width // 2 + width, width)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        *skips, skip = state["skips"]
        return {"x": torch.tanh(self.linear(torch.cat([state["x"], skip], dim=1))), "skips": skips}


class LitReplicas(Lit):
    """A module that trains on as many samples per step on one process as on all replicas.

    The logged values are means over the replicas.
    """

    @property
    def rows(self) -> int:
        """The number of samples per process in a step."""
        return ROWS if self.trainer.world_size > 1 else REPLICAS * ROWS

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(), self.rows, sampler=None if self.rows == ROWS else Dealt(22, shuffle=True))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(16), self.rows)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        pass


class LitFullySharded(LitReplicas):
    """A module that shards its layers over the replicas of their stage with FSDP2."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for layer in self.model:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class LitUNet(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Down(8), Down(4), Up(4), Up(8))
        self.inlet, self.outlet = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.model({"x": self.inlet(x), "skips": []})["x"])


class Remembering(nn.Module):
    """A layer that stores its input in a dict, or adds the tensor that it takes from the dict."""

    def __init__(self, memory: dict[str, Any], leaves: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.memory = memory
        self.leaves = leaves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.leaves:
            self.memory["skip"] = x
            return self.linear(x)
        return self.linear(x) + self.memory.pop("skip")


class LitHiddenSkip(Lit):
    def __init__(self) -> None:
        super().__init__()
        memory: dict[str, Any] = {}
        middle = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        layers = [nn.Linear(WIDTH, WIDTH), Remembering(memory, True), *middle, Remembering(memory, False)]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Table(nn.Module):
    """A module that all layers share. The first layer that calls it for a width creates the table."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(1) not in self.values:
            self.values[x.size(1)] = torch.linspace(0, 1, x.size(1), dtype=x.dtype)
        return x + self.values[x.size(1)]


class Configured(nn.Module):
    def __init__(self, settings: Any, table: Table) -> None:
        super().__init__()
        self.settings = settings
        self.table = table
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.settings.calls.append(len(x))
        return self.settings.scale * self.linear(self.table(x))


class LitShared(Lit):
    """A module whose layers share settings, an activation and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(scale=0.5, calls=[])
        table, activation = Table(), nn.ReLU()
        layers = [layer for _ in range(3) for layer in (Configured(self.settings, table), activation)]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Language(Lit):
    """Base class for models that return logits over tokens for each position."""

    tokens = True

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = (tokens % 4 != 3).long()
        mask[:, 0] = 1  # some of the other tokens count as padding
        return self.net(input_ids=tokens, attention_mask=mask).logits

    def error(self, batch: Any) -> torch.Tensor:
        tokens, _ = batch
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.error(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.error(batch))

    def on_validation_epoch_end(self) -> None:
        pass

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).softmax(-1)


class LitGPT2(Language):
    def __init__(self, dropout: float = 0.0, **settings: Any) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=TOKENS,
            n_positions=8,
            n_embd=8,
            n_layer=4,
            n_head=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
            **{"use_cache": False, **settings},
        )
        self.net = GPT2LMHeadModel(config)


def padded_labels() -> TensorDataset:
    """Return tokens, and the same tokens as labels, some of which are -100 after the first two positions."""
    (tokens, lengths), behind = data(tokens=True).tensors, torch.arange(5)
    return TensorDataset(tokens, tokens.masked_fill(behind[None] > 1 + lengths[:, None], -100))


class LitPaddedLabels(LitGPT2):
    def error(self, batch: Any) -> torch.Tensor:
        tokens, labels = batch
        return self.net(input_ids=tokens, labels=labels if labels.ndim > 1 else tokens).loss


class LitSummedLabels(LitGPT2):
    def error(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].flatten(), reduction="sum") / 20


class LitWeighs(LitGPT2):
    """A module whose loss is a weighted mean over tokens. The weights do not depend on the labels."""

    def error(self, batch: Any) -> torch.Tensor:
        each = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].flatten(), reduction="none")
        return (each * (batch[0].flatten() % 3)).sum() / self.microbatch_weight(batch)

    def microbatch_weight(self, batch: Any) -> torch.Tensor:
        return (batch[0] % 3).sum()


class LitCheckpointed(LitGPT2):
    """A module with the library's gradient checkpointing, which runs layers again before their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net.gradient_checkpointing_enable()


class LitRouted(Language):
    """A mixture of experts whose router adds its own loss to the loss of the model."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=TOKENS,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_implementation="eager",
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        )
        self.net = MixtralForCausalLM(config)

    def error(self, batch: Any) -> torch.Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss


class Experts(nn.Module):
    """A layer with two experts that stores the loss of its router, which is a mean over samples."""

    router_loss: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        self.router_loss = (shares * shares).sum(-1).mean()
        return x + sum(shares[:, n : n + 1] * torch.tanh(e(x)) for n, e in enumerate(self.experts))


class LitExperts(Lit):
    """A module whose step adds the losses that its layers store."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Experts() for _ in range(5)), nn.Linear(WIDTH, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        for layer in self.model[:-1]:
            loss = loss + 0.5 * layer.router_loss
        self.log("train_loss", loss)
        return loss


class LitCaching(LitGPT2):
    """A module whose step requests a cache of keys and values."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids=tokens, use_cache=True).logits


class LitBert(Language):
    """A model that predicts one label for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=TOKENS,
            hidden_size=8,
            num_hidden_layers=5,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        )
        self.net = BertForSequenceClassification(config)

    def error(self, batch: Any) -> torch.Tensor:
        tokens, y = batch
        return self.net(input_ids=tokens, labels=y).loss


class LitLlama(Language):
    """A model with rotary embeddings, which all layers receive in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            max_position_embeddings=8,
            use_cache=False,
        )
        self.net = LlamaForCausalLM(config)


class LitFlex(LitLlama):
    """A model whose attention uses a BlockMask, which the model creates before its layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register("flex on a CPU", attend_by_block_mask)
        AttentionMaskInterface.register("flex on a CPU", make_block_mask)
        self.net.config._attn_implementation = "flex on a CPU"


def make_block_mask(batch_size: int, q_length: int, kv_length: int, **given: Any) -> BlockMask:
    """Return the mask that `flex_attention_mask` of transformers creates, but without compiling it."""
    padding = given["attention_mask"].bool()

    def is_seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return given["mask_function"](b, h, q, kv) & padding[b, kv]

    return create_block_mask(is_seen, batch_size, None, q_length, kv_length, device="cpu")


def attend_by_block_mask(layer: nn.Module, q: Any, k: Any, v: Any, mask: Any, **given: Any) -> tuple[Any, None]:
    """Compute FlexAttention, or another attention with the same mask if gradients are needed.

    FlexAttention computes gradients only on GPUs.
    """
    assert isinstance(mask, BlockMask)
    if torch.is_grad_enabled():
        seen = create_mask(mask.mask_mod, *mask.shape, device="cpu")
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=given["scaling"])
    else:
        out = flex_attention(q, k, v, block_mask=mask, scale=given["scaling"])
    return out.transpose(1, 2).contiguous(), None


def add_adapter(base: type[Language], kind: str) -> Language:
    """Return a module with peft adapters in its layers, whose own weights are frozen."""
    from peft import IA3Config, LoraConfig, get_peft_model

    conv = base is LitGPT2  # the Conv1D layers of GPT-2 have transposed weights
    layers = ["c_attn"] if conv else ["q_proj", "v_proj"]
    lora = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": layers, "fan_in_fan_out": conv}
    configs = {
        "LoRA": lambda: LoraConfig(**lora),
        "DoRA": lambda: LoraConfig(**lora, use_dora=True),
        "IA3": lambda: IA3Config(task_type="CAUSAL_LM"),
    }
    lit = base()
    lit.net = get_peft_model(lit.net, configs[kind]())
    return lit


def adapter_saved(trainer: Any, module: Any, folder: Path) -> Any:
    """Save the adapter alone, and return the contents of its file.

    The base model into which plain peft loads this file must have the outputs of the module.
    """
    from peft import PeftModel
    from safetensors.torch import load_file

    target = folder / f"adapter of {trainer.global_rank}"
    module.net.save_pretrained(target)
    with isolate_rng():
        pl.seed_everything(3, verbose=False)
        plain = type(module)().eval().to(module.dtype)
    inputs = data(tokens=True).tensors[0]
    with torch.no_grad():
        before, trained = plain(inputs), module.eval()(inputs)
        plain.net = PeftModel.from_pretrained(plain.net, target)
        read = plain(inputs)
    assert differences(plain_values(read), plain_values(trained), tolerance=1e-12) == []
    assert differences(plain_values(before), plain_values(trained), tolerance=1e-3) != []
    return load_file(target / "adapter_model.safetensors")


def no_peft() -> str:
    return "" if find_spec("peft") else "peft is not installed"


class LitT5(Language):
    """A T5 model. The first layer of its encoder creates a position bias for all layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=TOKENS,
            d_model=8,
            d_kv=4,
            d_ff=16,
            num_layers=4,
            num_decoder_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
        self.net = T5ForConditionalGeneration(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids=tokens, decoder_input_ids=tokens).logits
