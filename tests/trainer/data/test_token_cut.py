"""Tests of micro-batches of equal numbers of tokens: how batches are divided, and training against one process."""

from __future__ import annotations

import re
import warnings
from functools import cache, partial
from itertools import combinations
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import JobArray, PipelineStrategy
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import InputError, PipelineError, Span
from lightning_pipes.ir.instruction import even_spans
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.data.length_cost import divide_lengths
from lightning_pipes.trainer.data.token_cut import TokenCut, TokenCutter
from tests.trainer.data.token_modules import (
    LENGTHS,
    LitCausal,
    LitFlex,
    LitMasked,
    batch_of,
    fitted,
)
from tests.trainer.lit import differences, plain_values, quiet
from tests.trainers import make_trainer


class LitPadded(LitCausal):
    """A model whose result depends on the length of the padding."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.layers(batch["input_ids"])
        logits = logits + logits.mean(1, keepdim=True)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class LitFixed(LitCausal):
    """A step that needs sequences of the length of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.layers(batch["input_ids"])
        return (logits * torch.ones(29, 1)).sum() / len(logits)


OF_TWO: dict[str, dict[str, Any]] = {
    "layers": {"verify": 2},
    "units": {"module": "", "verify": 2},
    "zero bubble": {"schedule": "zero_bubble", "recompute": True},
    "v": {"schedule": "v", "microbatches": 20},
    "auto": {"schedule": "auto", "partition": "auto", "microbatches": None},
    "replan": {"schedule": "1f1b", "partition": "auto", "replan": True},
    "chosen": {"microbatches_by": "auto", "verify": 2},
    "chosen for units": {"microbatches_by": "auto", "module": ""},
}
OF_FOUR: dict[str, dict[str, Any]] = {
    "interleaved": {"schedule": "interleaved"},
    "units of four": {"module": "", "schedule": "ready"},
}


def fitted_all(rank: int, cases: dict[str, dict[str, Any]], ranks: int) -> dict[str, Any]:
    return {name: fitted(LitCausal, ranks, settings) for name, settings in cases.items()}


@cache
def piped(ranks: int) -> list[dict[str, Any]]:
    return run_ranks(fitted_all, ranks, OF_TWO if ranks == 2 else OF_FOUR, ranks, timeout=480)


@cache
def plain() -> dict[str, Any]:
    return fitted(LitCausal, 1, None)


@pytest.mark.parametrize("name", [*OF_TWO, *OF_FOUR])
def test_training_that_equals_one_process(name: str) -> None:
    """Gradients, weights, logs, hooks and predictions equal those of one process with whole, padded batches."""
    for found in piped(2 if name in OF_TWO else 4):
        for key in ("weights", "metrics", "predicted"):
            assert differences(found[name][key], plain()[key], 1e-9) == [], key
        for own, whole in zip(found[name]["gradients"], plain()["gradients"], strict=True):
            assert differences(own, {each: whole[each] for each in own}, 1e-9) == []
        assert differences(found[name]["steps"], plain()["steps"], 1e-9) == []
        assert found[name]["said"] == []


OTHER: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "pipedream": (2, {"schedule": "pipedream"}, {"accumulate_grad_batches": 2}),
    "pipedream_2bw by units": (2, {"schedule": "pipedream_2bw", "module": ""}, {}),
    "dynpipe": (2, {"schedule": "dynpipe"}, {}),
    "csp": (2, {"schedule": "csp"}, {}),
    "replicas": (4, {"data_parallel": 2}, {"accumulate_grad_batches": 2}),
    "replicas by units": (4, {"data_parallel": 2, "module": ""}, {}),
    "overlapping replicas": (4, {"data_parallel": 2, "schedule": "pipedream"}, {}),
}
"""The number of ranks, and the settings of the strategy and of the Trainer, of runs that differ from one process."""


def fitted_both(rank: int, ranks: int, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [
            fitted(LitCausal, ranks, {"microbatches_by": by, **OTHER[name][1]}, **OTHER[name][2])
            for by in ("tokens", "samples")
        ]
        for name in names
    }


@cache
def both(ranks: int) -> list[dict[str, list[dict[str, Any]]]]:
    return run_ranks(fitted_both, ranks, ranks, [n for n in OTHER if OTHER[n][0] == ranks], timeout=480)


@pytest.mark.parametrize("name", OTHER)
def test_training_that_equals_micro_batches_by_samples(name: str) -> None:
    """Overlapping batches and replicas train the same weights as with micro-batches of equal numbers of samples."""
    for found in both(OTHER[name][0]):
        by_tokens, by_samples = found[name]
        assert differences(by_tokens["weights"], by_samples["weights"], 1e-9) == []
        assert differences(by_tokens["predicted"], by_samples["predicted"], 1e-9) == []
        is_uncompared = name == "pipedream_2bw by units"
        for key in ("loss", "val", "length") if is_uncompared else by_samples["metrics"]:
            assert differences(by_tokens["metrics"][key], by_samples["metrics"][key], 1e-9) == [], key
        assert len(by_tokens["shapes"]) > len(by_samples["shapes"])


def test_values_that_overlapping_batches_do_not_compare() -> None:
    """A warning names the values that may be means over tokens, if no whole batch shows how they are merged."""
    name = "pipedream_2bw by units"
    said = [" ".join(found[name][0]["said"]) for found in both(2)]
    assert "logs or returns self.log('accuracy'), self.log('length'), which are averaged over micro-batches" in said[0]
    assert "averaged over micro-batches" not in " ".join(both(2)[0]["pipedream"][0]["said"])


def siblings(rank: int) -> list[Any]:
    settings: list[dict[str, Any]] = [{}, {"module": ""}, {"microbatches_by": "samples"}]
    jobs = [partial(fitted, LitCausal, 2, each) for each in settings]
    return [(found.error, found.value) for found in JobArray(2).run(jobs)]


def test_siblings_of_an_array() -> None:
    """Each sibling sorts its own batches, and trains as in one process."""
    for found in run_ranks(siblings, 2, timeout=480):
        for error, value in found:
            assert error is None
            assert differences(value["weights"], plain()["weights"], 1e-9) == []
            assert differences(value["steps"], plain()["steps"], 1e-9) == []
        assert len(found[0][1]["shapes"]) == len(found[1][1]["shapes"]) > len(found[2][1]["shapes"])


FLEX: dict[str, tuple[type[LitCausal], dict[str, Any]]] = {
    "zero bubble": (LitFlex, {"schedule": "zero_bubble"}),
    "v": (LitFlex, {"schedule": "v"}),
    "v, recomputed": (LitFlex, {"schedule": "v", "recompute": True}),
    "in the batch": (LitMasked, {"schedule": "zero_bubble", "microbatches_by": "samples"}),
}


def fitted_flex(rank: int) -> tuple[dict[str, Any], str]:
    found = {name: fitted(kind, 2, {"module": "", **settings}) for name, (kind, settings) in FLEX.items()}
    for each in found.values():
        del each["steps"]  # masks cannot be pickled
    with pytest.raises(PipelineError) as refused:
        fitted(LitMasked, 2, {"module": ""}, lengths=LENGTHS[:1])
    return found, str(refused.value)


def test_masks_of_flex_attention() -> None:
    """A BlockMask and other objects are inputs of stages with split backwards, and are cut with their samples."""
    for found, refused in run_ranks(fitted_flex, 2, timeout=480):
        for name, (kind, _) in FLEX.items():
            whole = flex_of_one(kind)
            for key in ("weights", "metrics", "predicted"):
                assert differences(found[name][key], whole[key], 1e-9) == [], (name, key)
            for own, of_all in zip(found[name]["gradients"], whole["gradients"], strict=True):
                assert differences(own, {each: of_all[each] for each in own}, 1e-9) == [], name
            assert found[name]["said"] == []
        assert "the batch contains a BlockMask for 29 tokens" in refused


@cache
def flex_of_one(kind: type[LitCausal]) -> dict[str, Any]:
    return fitted(kind, 1, None)


@pytest.mark.parametrize("name", ["layers", "units", "chosen", "chosen for units"])
def test_micro_batches_are_cropped(name: str) -> None:
    """Each micro-batch of the first batch has the length of its longest sequence."""
    shapes = [tuple(each) for each in piped(2)[0][name]["shapes"]]
    assert {(1, 29), (2, 16), (4, 9), (5, 5)} <= {*shapes}
    assert plain()["shapes"] == [(3, 9), (7, 21), (8, 5), (12, 29)]


REFUSED: dict[str, tuple[type[LitCausal], dict[str, Any], dict[str, Any], str]] = {
    "unchecked": (LitCausal, {"check_loss": False}, {}, "check_loss=False leaves out the comparison that shows how"),
    "fixed": (
        LitFixed,
        {},
        {},
        r"cropped the sequences of this micro-batch from 29 to 16 tokens, in batch\['attention",
    ),
    "dropout": (LitCausal, {"verify": 1}, {"module": {"dropout": 0.1}}, "a Dropout is active"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_training(name: str) -> None:
    """Settings and modules that do not train as in one process are refused, and errors of cropped steps explained."""
    kind, settings, options, text = REFUSED[name]
    with pytest.raises((PipelineError, RuntimeError)) as found:
        fitted(kind, 1, settings, lengths=LENGTHS[:1], **options)
    assert re.search(text, " ".join([str(found.value), *getattr(found.value, "__notes__", ())]))


def depending(rank: int) -> list[list[str]]:
    return [fitted(LitPadded, 2, settings, lengths=LENGTHS[:1])["said"] for settings in ({}, {"module": ""})]


def test_warnings_of_results_that_depend_on_padding() -> None:
    """A module that reads its padding trains differently, and a warning says so, for both kinds of cuts."""
    by_layers, by_units = (" ".join(each) for each in run_ranks(depending, 2, timeout=240)[0])
    assert "training differs from one process" in by_layers
    assert "LitPadded.training_step trains differently in micro-batches than in one process" in by_units


class LitLlama(pl.LightningModule):
    """A causal model of transformers, whose loss is a mean over labels in single precision."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 51, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
        self.net = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted_llama(rank: int, ranks: int) -> tuple[list[str], Any, Any]:
    """Train on batches of a collator of transformers, and return warnings, weights and logs."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    quiet()
    pl.seed_everything(0, verbose=False)
    words = Tokenizer(models.WordLevel({**{f"w{n}": n for n in range(50)}, "[PAD]": 50}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 40, (16,), generator=generator).tolist()
    data: Any = [{"input_ids": torch.randint(1, 50, (n,), generator=generator).tolist()} for n in lengths]
    loader = DataLoader(data, batch_size=8, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
    module = LitLlama().double()
    strategy: Any = PipelineStrategy("1f1b", 4, microbatches_by="tokens", partition="parameters")
    trainer = make_trainer(devices=ranks, strategy=strategy if ranks > 1 else "auto", max_epochs=1, log_every_n_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    said = [str(w.message) for w in caught if "micro-batch" in str(w.message)]
    return said, plain_values(dict(module.state_dict())), plain_values(dict(trainer.callback_metrics))


def test_collator_of_transformers() -> None:
    """The first batch shows the weights, although the micro-batches have almost equal numbers of tokens."""
    pytest.importorskip("transformers")
    said, weights, logs = run_ranks(fitted_llama, 2, 2, timeout=240)[0]
    _, expected, expected_logs = fitted_llama(0, 1)
    assert said == []
    assert differences(weights, expected, 1e-9) == []
    assert differences(logs, expected_logs, 1e-6) == []


# ---- without training


@pytest.mark.parametrize("stages", [1, 4])
def test_division_with_the_least_cost(stages: int) -> None:
    """The groups take the least time among all ways to divide sorted sequences."""

    def seconds(lengths: Any, ends: list[int]) -> float:
        costs = [(b - a) * lengths[a] for a, b in zip([0, *ends], ends, strict=False)]
        return sum(costs) + (stages - 1) * max(costs)

    generator, ratios = np.random.default_rng(0), []
    for _ in range(20):
        lengths = np.sort(generator.integers(1, 40, 9))[::-1]
        every = [[*each, 9] for each in combinations(range(1, 9), 3)]
        ends = divide_lengths(lengths, 4, stages)
        assert len(ends) == 4
        assert ends == sorted({*ends})
        assert ends[-1] == 9
        ratios.append(seconds(lengths, ends) / min(seconds(lengths, each) for each in every))
        rows = np.diff([0, *divide_lengths(lengths, 4, stages, least=2)])
        assert min(rows) == 2
        assert sum(rows) == 9
    assert max(ratios) < 1.03  # the size of the largest group is limited to a few values


def cut(batch: Any, rows: int, microbatches: int = 3) -> TokenCut | None:
    return TokenCutter(2).cut(batch, rows, even_spans(rows, min(rows, microbatches)), ())


def test_samples_of_micro_batches() -> None:
    """Every sample is in one micro-batch, with all of its columns, and values return to the order of the batch."""
    batch = batch_of(LENGTHS[0])
    made = cut(batch, 12)
    assert made is not None
    take = made.make_cutter(made.batch, ())
    parts = [take(span) for span in made.spans.values()]
    assert [*made.spans] == [*even_spans(12, 3)]
    numbers = [int(n) for part in parts for n in part["number"]]
    assert sorted(numbers) == [*range(12)]
    assert numbers == [*made.order]
    for part in parts:
        width = part["attention_mask"].sum(1).max()
        for name in ("input_ids", "attention_mask", "labels"):
            rows = part["number"]
            assert torch.equal(part[name], batch[name][rows, :width])
        assert part["names"] == [batch["names"][n] for n in part["number"]]
    whole = take(Span(0, 12))
    assert whole["input_ids"].shape == (12, 29)
    back = made.restore_order(whole)
    assert torch.equal(back["input_ids"], batch["input_ids"])
    assert back["names"] == batch["names"]
    first = next(iter(made.spans.values()))
    padded = made.pad({"x": torch.ones(*parts[-1]["input_ids"].shape, 2)}, [*made.spans.values()][-1])["x"]
    assert padded.shape[1] == 29
    assert padded.sum() == parts[-1]["input_ids"].numel() * 2
    assert made.pad(torch.ones(first.rows, 29), first).shape == (first.rows, 29)


def test_lists_of_samples_are_sorted_too() -> None:
    """Check a list with as many tensors as samples, each as long as the list. Alone, it could also be columns."""
    batch = batch_of(LENGTHS[0])
    batch["scores"] = [torch.full((12,), n) for n in range(12)]
    made = TokenCutter(2).cut(batch, 12, even_spans(12, 3), [(len(batch) - 1,)])
    assert made is not None
    assert [int(each[0]) for each in made.batch["scores"]] == [*made.order]
    columns = TokenCutter(2).cut(batch, 12, even_spans(12, 3), [])
    assert columns is not None
    assert [each.tolist() for each in columns.batch["scores"]] == [[n] * 12 for n in range(12)]


def with_mask(name: str, invert: bool = False, **others: Any) -> dict[str, Any]:
    found = batch_of(LENGTHS[0])
    mask = found["attention_mask"] == int(not invert)
    return {"tokens": found["input_ids"], name: mask, **others}


ROWS = 12
MASK = batch_of(LENGTHS[0])["attention_mask"]
SOURCES: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "labels": ({"tokens": (b := batch_of(LENGTHS[0]))["input_ids"], "labels": b["labels"]}, [(29,), (29,)]),
    "a tuple": ((b["input_ids"], b["labels"]), [(29,), (29,)]),
    "a mask": (with_mask("mask"), [(29,), (29,)]),
    "a mask of padding": (with_mask("key_padding_mask", invert=True), [(29,), (29,)]),
    "a mask without a name": ((b["input_ids"], MASK == 0), [(29,), (29,)]),
    "pairs of tokens": (
        {**with_mask("attention_mask"), "mask": torch.ones(12, 1, 29, 29)},
        [(29,), (29,), (1, 29, 29)],
    ),
    "vectors": ({"x": torch.ones(12, 29, 3), "attention_mask": MASK}, [(29, 3), (29,)]),
    "a mask that is added": (
        {"input_ids": b["input_ids"], "attention_mask": torch.where(MASK == 0, -1e9, 0.0)},
        [(29,), (29,)],
    ),
    "a decoder with its own mask": (
        {
            **with_mask("attention_mask"),
            "decoder_input_ids": b["input_ids"].flip(0),
            "decoder_attention_mask": MASK.flip(0),
            "labels": b["labels"].flip(0),
        },
        [(29,), (29,), (0, 29), (0, 29), (0, 29)],
    ),
    "targets of another length": ({**with_mask("attention_mask"), "labels": torch.ones(12, 7)}, [(29,), (29,), (7,)]),
    "targets of the same length": (
        {**with_mask("attention_mask"), "targets": torch.arange(12 * 29).view(12, 29)},
        [(29,), (29,), (0, 29)],
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_of_lengths(name: str) -> None:
    """The tensors with an entry for each token are cropped, and other tensors keep their length."""
    batch, shapes = SOURCES[name]
    made = cut(batch, 12)
    assert made is not None
    last = [*made.spans.values()][-1]
    width = made.widths[last]
    expected = [tuple(width if n == 29 and 0 not in shape else n for n in shape if n) for shape in shapes]
    assert [tuple(t.shape[1:]) for t in tensors_in(made.make_cutter(made.batch, ())(last))] == expected
    assert width < 29
    assert last.rows > 3


def test_batches_without_lengths() -> None:
    """The error names the tensors of the batch and what was looked for."""
    for batch in ({"x": torch.ones(4, 3), "y": torch.ones(4)}, {"tokens": torch.ones(4, 3, dtype=torch.int64)}):
        with pytest.raises(PipelineError, match=r"no tensor of the batch shows them: batch.*It looked for a mask"):
            cut(batch, 4)


def test_labels_that_do_not_show_lengths() -> None:
    """Tokens after the last label are not padding if they differ, as in a masked language model."""
    labels = torch.full((4, 9), -100)
    labels[:, 2] = labels[1, 5] = 3
    batch = {"input_ids": torch.arange(36).view(4, 9), "labels": labels}
    for more in ({}, {"position_ids": torch.arange(9).repeat(4, 1)}):
        with pytest.raises(PipelineError, match="no tensor of the batch shows them"):
            cut({**batch, **more}, 4)


def test_batches_of_one_length() -> None:
    assert cut(batch_of([5] * 8), 8) is None
    assert cut(batch_of([5, 3]), 2, 1) is None


def test_leading_padding() -> None:
    """Padding before the tokens is cropped only if results do not depend on its length."""
    batch = batch_of(LENGTHS[0], leading=True)
    with pytest.warns(UserWarning, match="the batch has no position_ids"):
        assert cut(batch, 12) is None
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with pytest.warns(UserWarning, match="labels'] counts the first token of sequences"):
        assert cut(batch, 12) is None
    batch["labels"][torch.arange(12), batch["attention_mask"].argmax(1)] = -100
    made = cut(batch, 12)
    assert made is not None
    for span in made.spans.values():
        part = made.make_cutter(made.batch, ())(span)
        width = made.widths[span]
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(part[name], batch[name][part["number"], 29 - width :])


def test_refused_settings() -> None:
    for settings, text in (
        ({"schedule": "umpipe"}, "may cut a batch differently on each stage"),
        ({"schedule": "umpipe", "schedule_args": {"forward": (2, 4)}}, "may cut a batch differently on each stage"),
        ({"loss": "batch"}, "joins the outputs of micro-batches before the loss"),
        ({"data_parallel": [2, 1]}, "divides the samples of each micro-batch"),
        ({"microbatches_by": "words"}, "microbatches_by"),
    ):
        with pytest.raises(InputError, match=text):
            PipelineStrategy(**{"microbatches_by": "tokens", **settings})  # type: ignore[arg-type]
