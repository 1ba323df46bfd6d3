"""Fine-tune a Hugging Face model with LoRA in a pipeline of two processes: `python examples/lora.py`.

The script needs the packages transformers and peft. It downloads nothing: the model is a small Llama with random
weights. For a real model, use `AutoModelForCausalLM.from_pretrained`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import torch
from data import StdlibText
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from lightning_pipes import PipelineStrategy


class FineTuning(L.LightningModule):
    """Trains the adapters of a causal language model."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
        adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.net = get_peft_model(LlamaForCausalLM(config), adapters)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


if __name__ == "__main__":  # each process runs this script
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--windows", type=int, default=320, help="windows of text in the epoch")
    parser.add_argument("--out", type=Path, default=Path("outputs/lora"), help="the directory of adapters and report")
    arguments = parser.parse_args()

    L.seed_everything(0, verbose=False)
    module = FineTuning(arguments.layers, arguments.width)
    strategy = PipelineStrategy("1f1b", microbatches=4, verify=2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module, StdlibText(context=64, windows=arguments.windows, batch_size=32))
    if trainer.is_global_zero:
        trained, everything = module.net.get_nb_trainable_parameters()
        module.net.save_pretrained(arguments.out)  # after fit, rank 0 has the adapters of all stages
        print(f"loss {trainer.callback_metrics['loss']:.3f}, {trained} of {everything} parameters trained")
        print(f"adapters {arguments.out / 'adapter_model.safetensors'}")
        print(f"bubble {strategy.report.bubble_measured:.0%}, picture {strategy.report.save(arguments.out).picture}")
