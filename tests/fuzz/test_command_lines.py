"""Tests with random command lines of `lightning-pipes` and random contents of the named files.

A command works, or it ends with a sentence that describes the error: without a traceback, a hang, or gigabytes of
memory.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipes.sim.records.record import RUN_FILE
from lightning_pipes.testing.generators import record_of
from lightning_pipes.tune.cli import main
from tests.fuzz.values import deadline

FEW, MANY = 40, 3000
SECONDS = 120
"""Seconds for one command. The slowest one takes a few seconds on a quiet machine."""

WORDS = (
    *("", "x", "0", "1", "2", "3", "-1", "1.5", "1e9", "1000000000", "10" * 30, "nan", "inf", "-inf", "null", "true"),
    *("[]", "[1]", "[1,2]", "[0]", "[-1,3]", "[a,b]", "[1,[2]]", "{a:1}", "{}", "4GiB", "10us", "1e-30s", "1e400"),
    *(
        "0B",
        "-4ms",
        "5 parsecs",
        "é",
        "a=b",
        "'",
        "[",
        "}",
        "${oc.env:HOME}",
        "${x}",
        "???",
        "auto",
        "\n",
        "1e40Gbit/s",
    ),
)
SCHEDULES = ("1f1b", "gpipe", "kfkb", "interleaved", "zero_bubble", "hanayo", "v", "deep", "per_link", "ready", "jap")
SCHEDULE_SETTINGS = (
    *("schedule.k", "schedule.slack", "schedule.limits", "schedule.waves", "schedule.extra"),
    *("schedule.stages_per_rank", "schedule", "schedule.name", "schedule._target_", "+schedule.x"),
)
SIMULATE = (
    *("ranks", "microbatches", "forward", "backward", "step", "message", "activations", "weights", "profile", "model"),
    *("device", "dtype", "optimizer", "batch", "partition", "recompute", "memory", "bandwidth", "latency", "cluster"),
    *("cluster.hosts", "cluster.devices_per_host", "cluster.inside.bandwidth", "nonsense", "hydra.run.dir"),
)
ODD_FILES = (
    *("none.json", "empty", "binary.json", "nothing.json", "deep.json", "run", f"run/{RUN_FILE}", "profile.json", "."),
    *("/", "/dev/null", "", "x" * 300, "a\0b", "~", "profile.json/x"),
)
MODELS = ("VGG-16", "vgg", "profile.json", "fails:make", "fails:late", "fails:none", "fine:make", "os:")
PLAN = (
    *(
        "ranks",
        "replicas",
        "batch",
        "microbatches",
        "recompute",
        "memory",
        "bandwidth",
        "latency",
        "cluster",
        "profile",
    ),
    *("model", "device", "dtype", "optimizer", "cluster.hosts", "cluster.memory", "nonsense"),
)
PROFILE = (*("rows", "repeats", "device", "threads", "optimizer", "split", "out", "model", "nonsense"),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Change to a folder with a good profile, a good run and odd files, and yield its path."""
    path = tmp_path_factory.mktemp("commands")
    record = record_of([2, 2, 6, 4], 2, 4, "kfkb", k=2)
    assert record.profile is not None
    record.profile.save(path / "profile.json")
    (path / "run").mkdir()
    record.save(path / "run" / RUN_FILE)
    (path / "empty").mkdir()
    (path / "binary.json").write_bytes(bytes(range(256)))
    (path / "nothing.json").write_text("")
    (path / "deep.json").write_text("[" * 100_000)
    (path / "fails.py").write_text("def make():\n    return 5\n\ndef late():\n    raise ValueError('mine')\n")
    (path / "fine.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Sequential(torch.nn.ReLU()), torch.ones(1)\n"
    )
    before, threads, modules = Path.cwd(), torch.get_num_threads(), list(sys.path)
    os.chdir(path)
    yield path
    os.chdir(before)
    torch.set_num_threads(threads)
    sys.path[:] = modules


def broken(rng: random.Random, text: str) -> str:
    """Return a JSON text with random damage: cut off, edited or rearranged."""
    if rng.random() < 0.15:
        return text[: rng.randrange(len(text))]
    data = json.loads(text)
    for _ in range(rng.choice((1, 1, 2))):
        _spoil(rng, data)
    return json.dumps(data)


def _spoil(rng: random.Random, data: Any) -> None:
    """Change one random place in the data."""
    at, key = data, rng.choice(list(data))
    while isinstance(at[key], dict | list) and at[key] and rng.random() < 0.85:
        at = at[key]
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
    change = rng.randrange(4)
    if change == 0:
        del at[key]
    elif change == 1 and isinstance(at, dict):
        at["more"] = at.pop(key)
    elif change == 2 and isinstance(at, list):
        at.append(copy.deepcopy(at[key]))
    else:
        at[key] = rng.choice(
            (
                None,
                True,
                -1,
                0,
                10**9,
                10**30,
                1.5,
                -0.5,
                1e308,
                float("nan"),
                float("inf"),
                "x",
                "",
                [],
                {},
                [1],
                {"a": 1},
            )
        )


def files_of(rng: random.Random, folder: Path, good: str) -> str:
    """Return the name of a file to read, which is good, damaged, odd or missing."""
    if rng.random() < 0.3:
        return rng.choice(ODD_FILES)
    path = folder / "broken" / Path(good).name
    path.parent.mkdir(exist_ok=True)
    path.write_text(broken(rng, (folder / good).read_text()))
    return rng.choice((str(path), good))


def settings(rng: random.Random, names: tuple[str, ...], folder: Path) -> list[str]:
    """Return random settings for some of these names."""
    made = []
    for name in rng.sample(names, rng.choice((1, 1, 2, 3))):
        if name == "profile":
            made.append(f"profile={files_of(rng, folder, 'profile.json')}")
        elif name == "schedule":
            made.append(f"schedule={rng.choice((*SCHEDULES, *WORDS))}")
        elif name == "model" and rng.random() < 0.5:
            made.append(f"model={rng.choice(MODELS)}")
        elif name == "device" and rng.random() < 0.5:
            made.append(f"device={rng.choice(('A100-40G', 'cpu', 'cuda', 'meta', 'cpu:7'))}")
        elif name == "cluster" and rng.random() < 0.5:
            made.append("cluster=dgx_a100")
        else:
            made.append(f"{name}={rng.choice(WORDS)}")
    return made


def flags(rng: random.Random) -> list[str]:
    some = ("--json", "--json", "--png", "--html", "--nonsense", "--png=x.png", "--html=x.html", "--html=none/x.html")
    return rng.sample(
        (*some, "--html=run", "--open", "word", "-x", "--out", "--out=empty"), rng.choice((0, 0, 0, 1, 2))
    )


def simulate(rng: random.Random, folder: Path) -> list[str]:
    some = settings(rng, SIMULATE, folder) + settings(rng, SCHEDULE_SETTINGS, folder)
    return [*(["schedule=" + rng.choice(SCHEDULES)] if rng.random() < 0.5 else []), *some, *flags(rng)]


def plan(rng: random.Random, folder: Path) -> list[str]:
    """Return arguments of a small planning problem, some of which are odd."""
    fine = [f"profile={files_of(rng, folder, 'profile.json')}", "ranks=2", "batch=8", "microbatches=[2,4]"]
    odd = settings(rng, PLAN, folder)
    changed = {each.partition("=")[0] for each in odd}
    if {"profile", "model"} & changed:
        changed |= {"profile"}
    return [each for each in fine if each.partition("=")[0] not in changed] + odd + flags(rng)


def stages(rng: random.Random, folder: Path) -> list[str]:
    """Return arguments of the same problem, with odd numbers of batches or constants."""
    fine = [each for each in plan(rng, folder) if not each.startswith("microbatches=[2")]
    theory = "loss=10,lipschitz=5,noise=0.04,lr=0.01,target=0.1"
    odd = (
        "1:196,4:222",
        "1:1,2:1",
        "0:1,2:3",
        "1:-1,2:nan",
        "1:1e300,2:1",
        "x",
        "",
        theory,
        theory.replace("0.1", "0"),
        "loss=inf",
    )
    return [*fine, *rng.choice(([], ["--batches", rng.choice(odd)], ["--theory", rng.choice(odd)], ["--all-shapes"]))]


def profile(rng: random.Random, folder: Path) -> list[str]:
    fine = ["model=fine:make", "rows=[1,2]", "repeats=1", "out=made.json"]
    odd = settings(rng, PROFILE, folder)
    changed = {each.partition("=")[0] for each in odd}
    return [each for each in fine if each.partition("=")[0] not in changed] + odd + flags(rng)


def report(rng: random.Random, folder: Path) -> list[str]:
    words = [files_of(rng, folder, f"run/{RUN_FILE}")]
    if rng.random() < 0.3:
        words += ["--profile", files_of(rng, folder, "profile.json")]
    more = [each for each in flags(rng) if each != "--open"]
    return [*words, *more]


def schedules(rng: random.Random, folder: Path) -> list[str]:
    return [*flags(rng), *rng.sample(("x=1", "kfkb"), rng.choice((0, 1)))]


COMMANDS: dict[str, tuple[Callable[[random.Random, Path], list[str]], int]] = {
    "simulate": (simulate, 10),
    "plan": (plan, 6),
    "stages": (stages, 2),
    "profile": (profile, 3),
    "report": (report, 10),
    "schedules": (schedules, 1),
}


@contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Capture output, and yield what is written to stderr."""
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        yield said


def ended(arguments: list[str]) -> str:
    """Return a description of the problem with the end of a command, or an empty string."""
    with quiet() as said:
        try:
            with deadline(SECONDS, arguments):
                code: object = main(arguments)
        except SystemExit as end:
            code = end.code
        except BaseException:
            lines = traceback.format_exc().strip().splitlines()
            own = [line.strip() for line in lines if "lightning_pipes/" in line]
            return f"{arguments}: {lines[-1][:200]} <- {own[-1] if own else ''}"
    text = said.getvalue() + (code if isinstance(code, str) else "")
    if "Traceback" in text:
        return f"{arguments}: prints a traceback: {text[-200:]}"
    if code in (0, None):
        return ""
    if code != 2 and not isinstance(code, str):
        return f"{arguments}: ends with {code!r}"
    if len(text.strip()) < 20 or len(text) > 2500:
        return f"{arguments}: says {len(text)} characters: {text[:200]!r}"
    return ""


def wrong(seed: int, cases: int, folder: Path, names: tuple[str, ...] = tuple(COMMANDS)) -> list[str]:
    """Return the problems of random command lines."""
    rng = random.Random(seed)
    found = []
    for _ in range(cases):
        (name,) = rng.choices(names, [COMMANDS[name][1] for name in names])
        arguments = COMMANDS[name][0](rng, folder)
        found.append(ended([name, *arguments]))
    return sorted({each for each in found if each})


@pytest.fixture(autouse=True)
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.open", lambda where: True)


def test_every_command_line_ends_in_a_result_or_a_sentence(folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = wrong(0, FEW, folder)
    assert not found, "\n".join(found)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000, "kibibytes more than before"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_thousands(seed: int, folder: Path) -> None:
    found = wrong(seed, MANY // 3, folder)
    assert not found, "\n".join(found)
