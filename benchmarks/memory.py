"""Peak memory and start-up time compared with the peers, for a real GPT with 21.5 M parameters on two processes.

Each row trains the same model on the same batches with AdamW, in new interpreters and through the public API of the
peer. The peak of a process is its largest resident memory (VmHWM) minus its memory after the imports, from the
construction of the model to the end of training. The table shows the larger peak of the two processes.

- *torch pipelining* is `torch.distributed.pipelining` with Schedule1F1B. Each process creates only its own stage.
- *DDP* is Lightning's DDP, with half of the batch on each process. *FSDP2* is `fully_shard` on each block.
- *ours* is `PipelineStrategy("1f1b")` with default settings. *ours, parameters* does not measure the layers. *ours,
  meta* has a module that is created on `meta`, like a model that does not fit into one process. Its peak is compared
  with the memory that the larger stage holds during training: weights, gradients and optimizer states with 16 bytes for
  each parameter, and activations.

The start-up time is the time from the start of `python script.py` to the end of the first step. It is divided into four
parts on rank 0: imports, the time until all ranks are connected, the time until training begins (layers are measured,
tried and cut), and the first step. Processor seconds are the total of all threads of rank 0. They hardly depend on
other programs on the machine. Our modules are compiled to bytecode first, because pip also compiles the peers.

Left out: GPUs, where the allocator of CUDA has its own peaks, and models that do not fit into one process.

    python benchmarks/memory.py [--quick] [--json] [--rounds N]
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.report import QUIET, describe_allocator, describe_machine, make_parser

WIDTH, HEADS, BLOCKS, TOKENS, VOCABULARY = 384, 6, 12, 128, 256
ROWS, MICROBATCHES, STEPS, RANKS = 16, 8, 4, 2
RESULTS = "MEMORY_BENCHMARK_RESULTS"
BEGUN = "MEMORY_BENCHMARK_BEGUN"
CACHED = "ours, cached profile"


def read_status(field: str) -> int:
    """Return the number of bytes in a field of /proc/self/status, such as VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


class Peak:
    """The peak of resident memory since the construction of this object, above the resident memory at that time."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._before = read_status("VmRSS")
        self.seconds_to_first_step = 0.0
        self.phases: dict[str, float] = {}
        """Seconds since `python script.py` at which the parts of the start-up ended, and processor seconds until then.
        """
        self.end_phase("imports")

    def end_phase(self, phase: str) -> None:
        """Record the time at which a part of the start-up ended. Only the first call for each part counts."""
        self.phases.setdefault(phase, time.time() - float(os.environ[BEGUN]))
        self.phases.setdefault(f"processor {phase}", time.process_time())

    def end_step(self) -> None:
        """Record the end of the first step. Later calls have no effect."""
        self.seconds_to_first_step = self.seconds_to_first_step or time.time() - float(os.environ[BEGUN])
        self.phases.setdefault("processor startup", time.process_time())

    def save(self, rank: int) -> None:
        """Write the measurements of this rank to a file for the parent process."""
        found = {"peak": read_status("VmHWM") - self._before, "startup": self.seconds_to_first_step, **self.phases}
        Path(os.environ[RESULTS], f"{rank}.json").write_text(json.dumps(found))


def make_layers(part: slice = slice(None)) -> list[Any]:
    """Return some layers of the model, which consists of an embedding, blocks and a head.

    Args:
        part: the positions of the layers.
    """
    import torch
    from torch import nn

    from benchmarks.engine import Block, Head

    torch.manual_seed(0)
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Embedding(VOCABULARY, WIDTH),
        *[lambda: Block(WIDTH, HEADS)] * BLOCKS,
        lambda: Head(WIDTH),
    ]
    return [make() for make in makers[part]]


def make_tokens(rows: int) -> Any:
    """Return random tokens for STEPS batches, of shape (STEPS * rows, TOKENS + 1)."""
    import torch

    return torch.randint(VOCABULARY, (STEPS * rows, TOKENS + 1), generator=torch.Generator().manual_seed(0))


def compute_loss(output: Any, target: Any) -> Any:
    """Return the mean cross entropy over all tokens."""
    from torch.nn import functional as F

    return F.cross_entropy(output, target)


# ---- the peers; each runs in a separate process, and Lightning or torchrun starts the other rank


def train_by_lightning(
    rows: int, on_meta: bool = False, configure: Callable[[Any], None] | None = None, **options: Any
) -> None:
    """Train with `Trainer.fit` and save the measurements.

    Args:
        rows: the number of samples in a batch of this process.
        on_meta: whether the layers are created on the meta device.
        configure: called by `configure_model` with the module.
        **options: arguments of the Trainer.
    """
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from benchmarks.harness.report import hush

    hush()
    peak = Peak()

    class GPT(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta" if on_meta else "cpu"):
                self.layers = nn.Sequential(*make_layers())

        def configure_model(self) -> None:
            if configure is not None:
                configure(self)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return compute_loss(self.layers(batch[:, :-1]), batch[:, 1:])  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Watch(L.Callback):
        def setup(self, *args: Any, **kwargs: Any) -> None:
            peak.end_phase("connecting")

        def on_train_start(self, *args: Any) -> None:
            peak.end_phase("setup")

        def on_train_batch_end(self, *args: Any) -> None:
            peak.end_step()

    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        max_epochs=1,
        callbacks=[Watch()],
        **QUIET,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(GPT(), DataLoader(make_tokens(rows), batch_size=rows))
    peak.save(trainer.global_rank)


def train_ours(**options: Any) -> None:
    """Train with `PipelineStrategy`.

    Args:
        **options: arguments of the strategy, or `on_meta` as for `train_by_lightning`.
    """
    from lightning_pipes import PipelineStrategy

    on_meta = options.pop("on_meta", False)
    train_by_lightning(ROWS, on_meta, strategy=PipelineStrategy("1f1b", microbatches=MICROBATCHES, **options))


def train_ddp() -> None:
    """Train with Lightning's DDP."""
    train_by_lightning(ROWS // RANKS, strategy="ddp")


def train_fsdp2() -> None:
    """Train with Lightning's ModelParallelStrategy, with `fully_shard` on each layer."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def configure(module: Any) -> None:
        mesh = module.device_mesh["data_parallel"]
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)

    strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    train_by_lightning(ROWS // RANKS, configure=configure, strategy=strategy)


def train_torch_pipelining() -> None:
    """Train with torch.distributed.pipelining. Each process creates only its own stage."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    peak = Peak()
    half = (BLOCKS + 2) // 2
    module = nn.Sequential(*make_layers(slice(half) if rank == 0 else slice(half, None)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=compute_loss)
    for rows in make_tokens(ROWS).split(ROWS):
        if rank == 0:
            schedule.step(rows[:, :-1], return_outputs=False)
        else:
            schedule.step(target=rows[:, 1:], losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        peak.end_step()
    peak.save(rank)
    dist.destroy_process_group()


PEERS: dict[str, Callable[[], None]] = {
    "torch pipelining": train_torch_pipelining,
    "DDP": train_ddp,
    "FSDP2": train_fsdp2,
    "ours": train_ours,
    CACHED: train_ours,
    "ours, parameters": lambda: train_ours(partition="parameters"),
    "ours, meta": lambda: train_ours(on_meta=True),
}
QUICK = ("torch pipelining", "DDP", "ours", CACHED, "ours, meta")


# ---- the processes and their measurements


def run_peer(name: str, folder: Path) -> dict[str, float]:
    """Run the processes of a peer.

    Args:
        name: a name in PEERS.
        folder: the working directory of the processes.

    Returns:
        The measurements of rank 0, with the larger peak of all ranks in bytes.
    """
    with tempfile.TemporaryDirectory() as results:
        threads = max(1, (os.cpu_count() or RANKS) // RANKS)
        environment = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
            "OMP_NUM_THREADS": str(threads),
            RESULTS: results,
            BEGUN: str(time.time()),
        }
        script = [str(Path(__file__).resolve()), "--peer", name]
        by_torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command = [sys.executable, *(by_torchrun if PEERS[name] is train_torch_pipelining else []), *script]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(f"{name} ended with status {done.returncode}:\n{done.stderr}")
        found = [json.loads(Path(results, f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {**found[0], "peak": max(each["peak"] for each in found)}


def compile_package() -> None:
    """Compile our modules to bytecode, because pip does so when it installs the peers."""
    for folder in ("lightning_pipes", "strategies", "benchmarks"):
        compileall.compile_dir(Path(__file__).resolve().parents[1] / folder, quiet=1)


def count_own_bytes() -> float:
    """Return the bytes that the larger of two even stages holds during training.

    These are weights, gradients, optimizer states, and the activations of the micro-batches in flight.
    """
    import torch
    from torch import nn

    half = (BLOCKS + 2) // 2
    parts = [nn.Sequential(*make_layers(cut)) for cut in (slice(half), slice(half, None))]
    held, x = [], torch.zeros((ROWS // MICROBATCHES, TOKENS), dtype=torch.long)
    for stage, part in enumerate(parts):
        saved: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in part.parameters()}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved, own: set[int] = own) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = part(x)
        weights = sum(p.nbytes for p in part.parameters())
        held.append(4 * weights + (RANKS - stage) * sum(saved.values()))
        x = y.detach().requires_grad_()
    return float(max(held))


def list_phases(runs: list[dict[str, float]], prefix: str) -> list[float]:
    """Return the median seconds of imports, connecting, setup and the first step."""
    keys = (f"{prefix}{phase}" for phase in ("imports", "connecting", "setup", "startup"))
    ends = [statistics.median(each[key] for each in runs) for key in keys]
    return [end - begin for begin, end in zip([0.0, *ends[:-1]], ends, strict=True)]


def main() -> None:
    """Run the peers in turn and print the tables."""
    parser = make_parser(__doc__, f"one round, without {set(PEERS) - set(QUICK)}")
    parser.add_argument("--rounds", type=int, default=3, help="the number of runs of each peer, in turns")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        PEERS[options.peer]()
        return
    import torch

    compile_package()
    names = QUICK if options.quick else tuple(PEERS)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(1 if options.quick else options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                found[name].append(run_peer(name, Path(folder)))
                print(f"{name}: {found[name][-1]['peak'] / 1e6:.0f} MB", file=sys.stderr, flush=True)
    about = f"torch {torch.__version__}, malloc of {describe_allocator()}"
    print(f"{describe_machine()}, {about}; GPT, {RANKS} processes")
    print(f"{'':22} {'peak, MB':>16} {'to the first step, s':>24}")
    for name, runs in found.items():
        peaks, startups = ([each[key] for each in runs] for key in ("peak", "startup"))
        print(
            f"{name:22} {statistics.median(peaks) / 1e6:8.0f} ({min(peaks) / 1e6:.0f} to {max(peaks) / 1e6:.0f})"
            f" {statistics.median(startups):12.2f} ({min(startups):.2f} to {max(startups):.2f})"
        )

    for title, prefix in (("seconds for", ""), ("processor seconds for", "processor ")):
        print(f"\n{title:22} {'imports':>12} {'connecting':>12} {'setup':>12} {'first step':>12}")
        for name, runs in found.items():
            if "setup" in runs[0]:
                print(f"{name:22}" + "".join(f" {seconds:12.2f}" for seconds in list_phases(runs, prefix)))

    def middle(name: str, key: str) -> float:
        return statistics.median(each[key] for each in found[name])

    keys = {
        "peak_over_torch": middle("ours", "peak") / middle("torch pipelining", "peak"),
        "peak_over_ddp": middle("ours", "peak") / middle("DDP", "peak"),
        "meta_over_own": middle("ours, meta", "peak") / count_own_bytes(),
        "torch_over_own": middle("torch pipelining", "peak") / count_own_bytes(),
        "startup_over_ddp_s": middle(CACHED, "startup") - middle("DDP", "startup"),
        "startup_over_ddp_processor_s": middle(CACHED, "processor startup") - middle("DDP", "processor startup"),
    }
    print(", ".join(f"{key} {value:.2f}" for key, value in keys.items()))
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
