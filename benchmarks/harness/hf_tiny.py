"""Tiny random models of Hugging Face families, created by rules for the names of config fields.

`families()` returns the families that have a pipeline plan; WITHOUT_PLAN lists some families without one.
`tiny_model(family)` returns a model of a family together with a batch.

A config class has hundreds of fields. SIZES contains the value for each field name that matters, and DIFFERENT contains
the values that no rule covers. All other fields keep the library's defaults, including `use_cache`. There are two
exceptions: dropout is disabled because it draws different numbers for micro-batches, and experts use the eager
implementation because the default kernel does not support float64.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

Batch = dict[str, torch.Tensor]

VOCABULARY, TOKENS, ROWS = 64, 8, 4
WIDTH, HEAD, HEADS, LAYERS = 32, 8, 4, 4
IGNORED = -100
"""The label of a token that does not contribute to the loss."""

NAMES: dict[int, str] = {
    WIDTH: "hidden_size d_model n_embd embed_dim embedding_size model_dim hidden_dim decoder_hidden_size "
    "text_hidden_size hidden_size_per_layer_input attention_dim lru_width embedding_dim qkv_hidden_size "
    "thinker_hidden_size out_hidden_size projection_dim output_hidden_size encoder_hidden_size "
    "time_embed_dim conv_channels output_dim merged_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size expert_intermediate_size moe_shared_expert_intermediate_size "
    "expert_ffn_hidden_size moe_ffn_hidden_size share_expert_dim moe_layer_intermediate_size "
    "expert_hidden_size",
    2 * WIDTH: "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim mlp_dim ffn_hidden_size "
    "ffn_intermediate_size mlp_hidden_size dense_intermediate_size intermediate_size_mlp "
    "shared_intermediate_size max_position_embeddings n_positions n_ctx max_target_positions vocab_size "
    "text_vocab_size vocab_size_per_layer_input vocab_size_per_layer codebook_size",
    HEAD: "head_dim attention_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim global_head_dim "
    "swa_head_dim d_kv linear_key_head_dim linear_value_head_dim kv_channels swa_v_head_dim "
    "attention_head_size index_head_dim key_head_dim value_head_dim head_size linear_head_dim "
    "indexer_head_dim num_mel_bins laurel_rank state_size mamba_d_state",
    4: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads attention_heads swa_num_attention_heads index_n_heads linear_num_value_heads "
    "mamba_n_heads num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts "
    "n_experts index_topk sliding_window attention_chunk_size chunk_size local_attention patch_size "
    "num_labels",
    2: "num_key_value_heads n_kv_heads num_global_key_value_heads swa_num_key_value_heads "
    "linear_num_key_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k "
    "top_k_experts experts_per_token spatial_merge_size temporal_patch_size num_codebooks eos_token_id "
    "sep_token_id",
    16: "kv_lora_rank q_lora_rank o_lora_rank attention_lora_rank low_rank max_source_positions image_size "
    "mamba_d_head num_position_embeddings",
    3: "num_channels in_channels",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts zero_expert_num "
    "first_k_dense_replace num_dense_layers moe_layer_start_index bos_token_id decoder_start_token_id "
    "cls_token_id mamba_n_groups pretraining_tp",
    0: "num_mtp_layers num_nextn_predict_layers pad_token_id num_kv_shared_layers altup_active_idx",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
MADE_EVEN_IF_NONE = {"num_key_value_heads", "head_dim", "pad_token_id", "moe_intermediate_size"}
LARGE = re.compile(r"(_size|_dim|_width|_hidden|_rank)$")
RANDOM = re.compile(r"drop|pdrop|mask_(time|feature)_prob|jitter")

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_MULTIMODAL = "glm4v_text glm_image_text glm_ocr_text paddleocr_vl_text qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text"
DIFFERENT: dict[str, dict[str, Any]] = {
    **{kind: {"rope_parameters": _ROPE} for kind in _MULTIMODAL.split()},
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    "bailing_hybrid": {"layer_group_size": 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}, "layer_types": ["full_attention"] * 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "ministral": {"head_dim": 8},
    "step3p5": {"sliding_window": 4},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
    },
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2, "qk_rope_head_dim": 0},
}
"""Config values that no rule covers, by model type."""

_SMALL_PICTURES = {"image_size": 32, "patch_size": 2, "depths": [1, 1, 2, 1], "num_labels": 4}
_FOUR_WIDTHS = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 16, 32], "num_labels": 4}
WITHOUT_PLAN: dict[str, tuple[str, Callable[[], Batch], dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", lambda: _text(), {}),
    "bert": ("BertForMaskedLM", lambda: _text(), {}),
    "roberta": ("RobertaForMaskedLM", lambda: _text(), {}),
    "deberta_v2": ("DebertaV2ForMaskedLM", lambda: _text(), {}),
    "distilbert": ("DistilBertForMaskedLM", lambda: _text(), {"dim": WIDTH, "hidden_dim": 2 * WIDTH}),
    "t5": ("T5ForConditionalGeneration", lambda: _text_pairs(), {"decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", lambda: _text_pairs(), {"forced_eos_token_id": 2}),
    "whisper": (
        "WhisperForConditionalGeneration",
        lambda: {"input_features": _noise(ROWS, 8, 32), "labels": _tokens(2)},
        {"begin_suppress_tokens": None, "suppress_tokens": None},
    ),
    "vit": ("ViTForImageClassification", lambda: _pictures(16), {"num_labels": 4}),
    "clip": ("CLIPModel", lambda: {"input_ids": _tokens(0), "pixel_values": _noise(ROWS, 3, 16, 16)}, {}),
    "wav2vec2": (
        "Wav2Vec2ForSequenceClassification",
        lambda: {"input_values": _noise(ROWS, 400), "labels": torch.arange(ROWS) % 2},
        {
            "conv_dim": (16, 16),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_labels": 2,
            "classifier_proj_size": 8,
        },
    ),
    "mamba": ("MambaForCausalLM", lambda: _text(), {}),
    "electra": ("ElectraForMaskedLM", lambda: _text(), {}),
    "albert": ("AlbertForMaskedLM", lambda: _text(), {}),
    "swin": (
        "SwinForImageClassification",
        lambda: _pictures(32),
        {**_SMALL_PICTURES, "embed_dim": 16, "num_heads": [2, 2, 4, 4], "window_size": 2},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        lambda: _pictures(32),
        {**_FOUR_WIDTHS, "image_size": 32, "patch_size": 2},
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        lambda: {"pixel_values": _noise(ROWS, 3, 32, 32), "labels": _tokens(0, 32, 32) % 4},
        {**_FOUR_WIDTHS, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": WIDTH},
    ),
}
"""Families without a pipeline plan: the class, a function that returns a batch, and settings that no rule covers."""

FOLDER = Path(str(transformers.__file__)).parent / "models"
WITHOUT_MODEL = {"qwen4_exp"}
"""Families for which the library has no model that computes a loss or hidden states of tokens."""
MOST_BYTES = 1 << 30
"""The address space that building a model may add. A model that is not tiny fails immediately."""


@dataclass
class Tiny:
    """A tiny model together with a batch.

    Attributes:
        model: the model, in float64.
        batch: a batch of ROWS samples.
        name: the name of the model's class.
    """

    model: nn.Module
    batch: Batch
    name: str

    def padded(self) -> Batch:
        """Return the batch with 0, 1 or 2 tokens of padding at the end of each sample, in turn.

        If the batch has no labels of tokens, it is returned unchanged.
        """
        if "labels" not in self.batch or self.batch["labels"].shape != (ROWS, TOKENS):
            return self.batch
        mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
        for row in range(ROWS):
            mask[row, TOKENS - row % 3 :] = 0
        found = {**self.batch, "labels": self.batch["labels"].masked_fill(mask == 0, IGNORED)}
        return found | ({"attention_mask": mask} if "input_ids" in found else {})

    def pictured(self) -> Batch:
        """Return a batch with a picture in each sample, for a family in PICTURED."""
        config: Any = self.model.config
        size, frames = config.vision_config.patch_size, getattr(config.vision_config, "temporal_patch_size", None) or 1
        tokens = self.batch["input_ids"].clamp(max=VOCABULARY // 2)  # special tokens come last
        tokens[:, 0] = getattr(config, "vision_start_token_id", None) or tokens[0, 0]
        tokens[:, 1:5] = config.image_token_id  # a picture of 4 x 4 patches; four patches form one token
        seen = (tokens == config.image_token_id).long()
        shape = (3, size, size) if PICTURED[config.model_type] else (3 * frames * size * size,)
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(seen == 1, IGNORED),
            "pixel_values": _noise(16 * ROWS, *shape),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
            "mm_token_type_ids": seen,
        }


PICTURED = dict.fromkeys(
    ["qwen2_vl", "qwen2_5_vl", "glm4v", "glm_ocr", "qwen3_vl_moe", "glm4v_moe", "ernie4_5_vl_moe", "cosmos3_edge"],
    False,
) | {"paddleocr_vl": True}
"""Families whose batches can contain pictures as patches. The value is whether a patch has separate axes or is flat."""


def families() -> list[str]:
    """Return the names of the families that have a pipeline plan."""
    paths = FOLDER.glob("*/configuration_*.py")
    found = {path.parent.name for path in paths if "base_model_pp_plan" in path.read_text()}
    return sorted(found - WITHOUT_MODEL)


def tiny_model(family: str, name: str | None = None) -> Tiny:
    """Return a tiny model of a family, with a batch.

    Args:
        family: the name of the family.
        name: the name of the model class. Without it, the first class that computes a finite loss is used.

    Raises:
        RuntimeError: no class of the family can be used.
    """
    if family in WITHOUT_PLAN:
        return _without_plan(family)
    errors = []
    made = _candidates(family)
    use_doubles()
    for candidate, make in made:
        if name not in (None, candidate):
            continue
        try:
            torch.manual_seed(0)
            model = make()
            use_doubles()
            config = model.model.config if isinstance(model, Headed) else model.config
            translates = bool(getattr(config, "is_encoder_decoder", False))
            tiny = Tiny(model.double().train(), _text_pairs() if translates else _text(), candidate)
            if name is None:
                for batch in (tiny.batch, tiny.padded()):
                    loss = copy.deepcopy(model)(**batch).loss
                    if not torch.isfinite(loss):
                        raise ValueError(f"loss {loss}")
                    loss.backward()
            return tiny
        except Exception as error:
            errors.append(f"{candidate}: {type(error).__name__}: {str(error)[:300]}")
    raise RuntimeError(f"{family}: " + ("; ".join(errors) or "no model class"))


def _without_plan(family: str) -> Tiny:
    name, batch, settings = WITHOUT_PLAN[family]
    kind = getattr(transformers, name)
    use_doubles()
    torch.manual_seed(0)
    model = _built(kind, kind.config_class, settings)
    use_doubles()
    made = Contrastive(model) if family == "clip" else model
    return Tiny(made.double().train(), batch(), name)


class Contrastive(nn.Module):
    """A model with two towers, which computes a loss only if `return_loss` is set."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.model(**batch, return_loss=True)


class Headed(nn.Module):
    """A base model for which the library has no language head, with a head as a user would write it."""

    def __init__(self, base: Any, width: int) -> None:
        super().__init__()
        self.model, self.head = base, nn.Linear(width, VOCABULARY, bias=False)
        self._told_of_time = any("t_cond" in inspect.signature(part.forward).parameters for part in base.modules())

    def forward(self, labels: torch.Tensor, **batch: torch.Tensor) -> Any:
        if self._told_of_time:
            batch["t_cond"] = torch.zeros(1, 1, WIDTH, dtype=self.head.weight.dtype)
        logits = self.head(self.model(**batch).last_hidden_state)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def _candidates(family: str) -> list[tuple[str, Callable[[], Any]]]:
    """Return the model classes of a family, as names with functions that build a model, most common classes first."""
    configs = _planned_configs(family)
    models: list[Any] = []
    for path in sorted((FOLDER / family).glob("modeling_*.py")):
        part = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        models += [c for c in _own_classes(part) if issubclass(c, transformers.PreTrainedModel)]
    chosen: list[tuple[str, Any, Any]] = []
    for config in configs:
        usual = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if usual and hasattr(transformers, usual):
            chosen.append((usual, getattr(transformers, usual), config))

    def add(*ends: str, known: bool) -> None:
        chosen.extend(
            (model.__name__, model, model.config_class)
            for model in models
            if model.__name__.endswith(ends)
            and (model.config_class in configs if known else model.config_class is not None)
        )

    add("ForCausalLM", known=True)
    add(
        "ForConditionalGeneration",
        "ForMaskedLM",
        "ForBlockDiffusion",
        "ForTokenClassification",
        "ForCausalLM",
        known=False,
    )
    found = {name: partial(_built, model, config) for name, model, config in reversed(chosen)}
    bases = [m for m in models if m.config_class in configs and re.search(r"(?<!PreTrained)Model$", m.__name__)]
    ordered = {name: found[name] for name, *_ in chosen}
    return [*ordered.items(), *((f"{m.__name__} + head", partial(_headed, m)) for m in bases)]


@cache
def _planned_configs(family: str) -> list[Any]:
    found: dict[Any, None] = {}
    for path in (FOLDER / family).glob("configuration_*.py"):
        part = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        found |= {c: None for c in _own_classes(part) if getattr(c, "base_model_pp_plan", None)}
    return list(found)


def _own_classes(module: Any) -> Iterator[Any]:
    return (c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__)


def _headed(model: Any) -> Headed:
    config = tiny_config(model.config_class)
    return Headed(_built(model, model.config_class), config.hidden_size)


def _built(model: Any, config: Any, settings: Mapping[str, Any] = MappingProxyType({})) -> Any:
    with _little_memory():
        built = model(tiny_config(config, settings))
    for part in built.modules():
        if hasattr(getattr(part, "config", None), "_experts_implementation"):
            part.config._experts_implementation = "eager"
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    return built


@contextmanager
def _little_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def tiny_config(kind: Any, settings: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return a small config of a class, including small versions of all configs inside it.

    Args:
        kind: the config class.
        settings: values that take precedence over all rules.
    """
    special = {**DIFFERENT.get(getattr(kind, "model_type", ""), {}), **settings}
    inside: Mapping[str, Any] = getattr(kind, "sub_configs", None) or {}
    defaults = {name: value for name, value in _defaults(kind).items() if name not in special and name not in inside}
    try:
        large = kind()
    except Exception:  # not every class has defaults for all of its fields
        large = None
    depths = [getattr(large, name, None) for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")]
    depth = next((d for d in depths if isinstance(d, int)), None)
    given: dict[str, Any] = {}
    for name, default in defaults.items():
        real = getattr(large, name, None) if default is None else default
        if name in SIZES:
            if default is not None or (name in MADE_EVEN_IF_NONE and (name != "head_dim" or isinstance(real, int))):
                given[name] = _sized(name, default, real, defaults)
        elif name.endswith(("_token_id", "_token_index")):
            if isinstance(default, int) and default >= 0:
                others = [n for n in given if n.endswith(("token_id", "token_index"))]
                given[name] = VOCABULARY - 1 - len(others) % 20
        elif isinstance(default, (list, tuple)) and depth and len(default) == depth:
            given[name] = type(default)([*default[: LAYERS - 1], default[-1]])
        elif type(default) is int and default >= 96 and LARGE.search(name):
            given[name] = WIDTH
    rope = defaults.get("rope_parameters") or getattr(large, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_parameters" in defaults:
        given["rope_parameters"] = _small_rope(rope)
    for name, sub in inside.items():
        if name in special:
            continue
        sub = type(getattr(large, name, None)) if sub.__name__ == "AutoConfig" else sub
        if sub is not type(None):
            given[name] = tiny_config(sub)
    given |= {n: 0.0 for n, d in defaults.items() if type(d) in (int, float) and d and RANDOM.search(n)}
    config = kind(**{**given, **special})
    config._experts_implementation = "eager"
    return config


def _sized(name: str, default: Any, real: Any, defaults: Mapping[str, Any]) -> Any:
    size: Any = SIZES[name]
    if name == "num_key_value_heads" and default in (None, defaults.get("num_attention_heads")):
        size = HEADS
    if name.endswith("token_id"):
        return [2] if isinstance(real, list) else size
    return type(default)([size] * min(len(default), LAYERS)) if isinstance(default, (list, tuple)) else size


def _defaults(kind: Any) -> dict[str, Any]:
    """Return the fields of a config class with their defaults, or None for values that the class derives."""
    if is_dataclass(kind):
        own: list[Any] = [*fields(kind)]
        made = {f.name: f.default_factory() for f in own if f.default_factory is not MISSING}
        return {f.name: made.get(f.name, None if f.default is MISSING else f.default) for f in own}
    parameters = inspect.signature(kind.__init__).parameters.items()
    return {n: None if p.default is p.empty else p.default for n, p in parameters if n not in ("self", "kwargs")}


def _small_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    small = {"mrope_section": [2, 1, 1], "original_max_position_embeddings": 32}
    small |= dict.fromkeys(("short_factor", "long_factor"), [1.0] * (HEAD // 2))
    return {
        name: _small_rope(value) if isinstance(value, dict) else small.get(name, value) for name, value in rope.items()
    }


def _tokens(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (ROWS, *(shape or (TOKENS,))), generator=generator)


def _text() -> Batch:
    return {"input_ids": _tokens(0), "labels": _tokens(0)}


def _text_pairs() -> Batch:
    return {"input_ids": _tokens(1), "labels": _tokens(2)}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _pictures(size: int) -> Batch:
    return {"pixel_values": _noise(ROWS, 3, size, size), "labels": torch.arange(ROWS) % 4}


class _Doubles:
    """A replacement for `torch` in modules of the library, with float64 in place of float32.

    In float32, rounding errors would hide whether results are equal.
    """

    float32 = float = torch.float64
    FloatTensor = torch.DoubleTensor

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_DOUBLES = _Doubles()
COMPUTING = (
    "loss.loss_utils",
    "masking_utils",
    "modeling_layers",
    "modeling_rope_utils",
    "activations",
    "integrations.moe",
    "integrations.sdpa_attention",
)
"""Modules of the library that take part in the computations of models."""


def use_doubles() -> None:
    """Make all parts of the library that are loaded in this process compute in float64."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    for name in COMPUTING:
        importlib.import_module(f"transformers.{name}")
    own = ("transformers.models.", *(f"transformers.{name.partition('.')[0]}" for name in COMPUTING))
    for name, module in list(sys.modules.items()):
        if name.startswith(own) and getattr(module, "torch", None) is torch:
            module.__dict__["torch"] = _DOUBLES
