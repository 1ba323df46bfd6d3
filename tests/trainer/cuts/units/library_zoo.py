"""Small models of transformers, torchvision and timm, which extend the plain modules of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.trainer.cuts.units.zoo import LENGTH, WIDTH, WORDS, Case, classify, generator, labels

ROWS, HEADS, LAYERS = 4, 2, 4
HUGGING_FACE: dict[str, Callable[[], Case]] = {}
VISION: dict[str, Callable[[], Case]] = {}
"""Cases of torchvision and timm, as far as these are installed."""


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator(seed))


def pixels(size: int) -> torch.Tensor:
    return torch.randn(ROWS, 3, size, size, generator=generator(), dtype=torch.float64)


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def contrast(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch, return_loss=True).loss


def text() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def padded() -> dict[str, torch.Tensor]:
    lengths = LENGTH - torch.arange(ROWS) % 3
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": tokens(), "attention_mask": mask, "labels": tokens().masked_fill(mask == 0, -100)}


def sentences() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "attention_mask": torch.ones_like(tokens()), "labels": labels(ROWS, 2)}


def pairs() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(1), "attention_mask": torch.ones_like(tokens()), "labels": tokens(2)}


def pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": pixels(16), "labels": labels(ROWS)}


def captions() -> dict[str, Any]:
    return {"input_ids": tokens(), "pixel_values": pixels(16)}


def spectrograms() -> dict[str, torch.Tensor]:
    return {
        "input_features": torch.randn(ROWS, 8, 32, generator=generator(), dtype=torch.float64),
        "labels": tokens(2),
    }


def waves() -> dict[str, torch.Tensor]:
    return {
        "input_values": torch.randn(ROWS, 400, generator=generator(), dtype=torch.float64),
        "labels": labels(ROWS, 2),
    }


def transformers_model(kind: str, config: str, **settings: Any) -> nn.Module:
    library = import_module("transformers")
    library.logging.set_verbosity_error()
    return getattr(library, kind)(getattr(library, config)(**settings))


def hugging_face(
    name: str, kind: str, config: str, batch: Callable[[], Any], checkpoints: bool = False, **settings: Any
) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        model: Any = transformers_model(kind, config, **settings)
        if checkpoints:
            model.gradient_checkpointing_enable()
        return Case(model.double().train(), batch(), contrast if batch is captions else own_loss)

    HUGGING_FACE[name] = build


ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
}
DECODER = ENCODER | ENDS | {"num_key_value_heads": HEADS}
ROUTED: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
    "output_router_logits": True,
}
GPT2: dict[str, Any] = {
    "vocab_size": WORDS,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH: dict[str, Any] = ENDS | {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
}
PATCHES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 16,
    "patch_size": 4,
}
LLAMA, GPT = ("LlamaForCausalLM", "LlamaConfig"), ("GPT2LMHeadModel", "GPT2Config")

hugging_face("gpt2", *GPT, text, **GPT2)
hugging_face("gpt2 padded", *GPT, padded, **GPT2)
hugging_face(
    "gpt2 hidden states",
    *GPT,
    text,
    output_hidden_states=True,
    output_attentions=True,
    attn_implementation="eager",
    **GPT2,
)
hugging_face("llama padded", *LLAMA, padded, **DECODER)
hugging_face("llama tied", *LLAMA, text, use_cache=False, tie_word_embeddings=True, **DECODER)
hugging_face("llama checkpoints", *LLAMA, text, checkpoints=True, **DECODER)
hugging_face("qwen2", "Qwen2ForCausalLM", "Qwen2Config", text, **DECODER)
hugging_face("qwen3", "Qwen3ForCausalLM", "Qwen3Config", text, head_dim=8, **DECODER)
hugging_face(
    "qwen3-moe router loss",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeConfig",
    text,
    head_dim=8,
    moe_intermediate_size=WIDTH,
    num_experts=4,
    **DECODER,
    **ROUTED,
)
hugging_face(
    "mixtral router loss",
    "MixtralForCausalLM",
    "MixtralConfig",
    text,
    num_local_experts=4,
    router_aux_loss_coef=0.1,
    **DECODER,
    **ROUTED,
)
hugging_face("mistral sliding", "MistralForCausalLM", "MistralConfig", text, sliding_window=4, **DECODER)
hugging_face("gemma", "GemmaForCausalLM", "GemmaConfig", text, head_dim=8, **DECODER)
hugging_face("gemma2", "Gemma2ForCausalLM", "Gemma2Config", text, head_dim=8, sliding_window=4, **DECODER)
hugging_face("phi3", "Phi3ForCausalLM", "Phi3Config", text, **DECODER)
hugging_face("bert", "BertForMaskedLM", "BertConfig", padded, **ENCODER)
hugging_face(
    "deberta-v2",
    "DebertaV2ForSequenceClassification",
    "DebertaV2Config",
    sentences,
    relative_attention=True,
    position_buckets=4,
    pos_att_type=["p2c", "c2p"],
    num_labels=2,
    **ENCODER,
)
hugging_face(
    "distilbert",
    "DistilBertForSequenceClassification",
    "DistilBertConfig",
    sentences,
    vocab_size=WORDS,
    dim=WIDTH,
    n_layers=LAYERS,
    n_heads=HEADS,
    hidden_dim=2 * WIDTH,
    max_position_embeddings=32,
    num_labels=2,
)
hugging_face(
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    pairs,
    vocab_size=WORDS,
    d_model=WIDTH,
    d_kv=8,
    d_ff=2 * WIDTH,
    num_layers=LAYERS,
    num_decoder_layers=LAYERS,
    num_heads=HEADS,
    decoder_start_token_id=0,
    pad_token_id=0,
)
hugging_face(
    "bart layerdrop",
    "BartForConditionalGeneration",
    "BartConfig",
    pairs,
    max_position_embeddings=32,
    decoder_start_token_id=2,
    forced_eos_token_id=2,
    encoder_layerdrop=0.3,
    **BOTH,
)
hugging_face(
    "whisper",
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    spectrograms,
    num_mel_bins=8,
    max_source_positions=16,
    max_target_positions=16,
    decoder_start_token_id=1,
    begin_suppress_tokens=None,
    suppress_tokens=None,
    **BOTH,
)
hugging_face("vit", "ViTForImageClassification", "ViTConfig", pictures, num_labels=4, **PATCHES)
hugging_face(
    "clip",
    "CLIPModel",
    "CLIPConfig",
    captions,
    text_config=ENCODER | {"eos_token_id": WORDS - 1},
    vision_config=PATCHES,
    projection_dim=8,
)
hugging_face(
    "wav2vec2 layerdrop",
    "Wav2Vec2ForSequenceClassification",
    "Wav2Vec2Config",
    waves,
    vocab_size=WORDS,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=2 * WIDTH,
    layerdrop=0.2,
    mask_time_prob=0.0,
    conv_dim=(WIDTH, WIDTH),
    conv_stride=(5, 2),
    conv_kernel=(10, 3),
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    num_labels=2,
    classifier_proj_size=8,
)
hugging_face(
    "mamba",
    "MambaForCausalLM",
    "MambaConfig",
    text,
    vocab_size=WORDS,
    hidden_size=WIDTH,
    state_size=4,
    num_hidden_layers=LAYERS,
    pad_token_id=0,
)


def vision(
    name: str,
    make: Callable[[], nn.Module],
    size: int = 32,
    step: Callable[[nn.Module, Any], torch.Tensor] = classify,
    library: str = "torchvision",
) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        return Case(make().double().train(), (pixels(size), labels(ROWS)), step)

    if find_spec(library) is not None:
        VISION[name] = build


def torchvision_model(name: str, **settings: Any) -> nn.Module:
    return getattr(import_module("torchvision.models"), name)(num_classes=4, **settings)


def timm_model(name: str, **settings: Any) -> nn.Module:
    return import_module("timm").create_model(name, num_classes=4, **settings)


def vgg() -> nn.Module:
    """Return VGG-16 with a narrow classifier."""
    found = import_module("torchvision.models.vgg")
    net = found.VGG(found.make_layers(found.cfgs["D"]), num_classes=4, init_weights=False)
    head = [nn.Linear(25088, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 64), nn.ReLU(True), nn.Dropout()]
    net.classifier = nn.Sequential(*head, nn.Linear(64, 4))
    return net


def with_auxiliary_losses(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    if not model.training:
        return F.cross_entropy(out, batch[1])
    beside = F.cross_entropy(out.aux_logits1, batch[1]) + F.cross_entropy(out.aux_logits2, batch[1])
    return F.cross_entropy(out.logits, batch[1]) + 0.3 * beside


def small_vit() -> nn.Module:
    settings = {"num_layers": 4, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "num_classes": 4}
    return import_module("torchvision.models").VisionTransformer(image_size=32, patch_size=8, **settings)


TORCHVISION = (
    "resnet18 resnet50 densenet121 mobilenet_v3_small efficientnet_b0 convnext_tiny swin_t shufflenet_v2_x0_5 "
    "regnet_y_400mf"
)
for plain in TORCHVISION.split():
    vision(plain, partial(torchvision_model, plain))
vision("vgg16", vgg)
vision(
    "googlenet with auxiliary losses",
    partial(torchvision_model, "googlenet", aux_logits=True, init_weights=False),
    64,
    with_auxiliary_losses,
)
vision("vit of torchvision", small_vit)
for name, settings in {
    "vit_tiny_patch16_224": {"img_size": 32},
    "mixer_s32_224": {"img_size": 32},
    "convnext_atto": {},
    "efficientnet_b0": {"drop_path_rate": 0.2},
}.items():
    vision(f"timm {name}", partial(timm_model, name, **settings), library="timm")
SUMMED = ("gpt2 padded", "llama padded", "bert", "qwen3-moe router loss", "mixtral router loss", "clip")
"""Cases whose loss is not a mean over samples."""
FLOAT32 = (
    *("llama tied", "llama checkpoints", "qwen2", "qwen3", "mistral sliding", "gemma", "gemma2", "phi3", "whisper"),
    *("vit", "mamba"),
)
"""Cases that compute in float32 internally, so that micro-batches and their batch are rounded differently."""
