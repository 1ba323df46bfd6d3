"""Tests for `lightning-pipes profile`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pipes.cost import ModelProfile
from lightning_pipes.ir import Kind
from tests.tune.cli.calls import ROOT, Say, found, refused


class TestProfile:
    def test_a_module_with_something_before_its_layers(
        self, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        out = tmp_path / "p.json"
        told = found(say, "profile", "model=tests.tune.factories:Lit", "rows=[2,6]", "repeats=1", f"out={out}")
        made = ModelProfile.load(out)
        assert [layer.name for layer in made.layers] == ["0 Linear", "1 ReLU", "2 Linear"]
        assert [rows for rows, _ in made.layers[0].forward] == [2, 6]
        assert made.layers[0].weight_bytes == 4 * 72 == told["layers"][0]["weight_bytes"]
        assert made.layers[0].optimizer_bytes == 4 * 72  # momentum of the module's own SGD
        assert all(each["forward_seconds"] > 0 for each in told["layers"])

    def test_layers_with_an_example(self, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        arguments = ("profile", "model=tests.tune.factories:sequential", "rows=3", "repeats=1", "split=true")
        text = say(*arguments, f"out={tmp_path / 'p.json'}", "optimizer=Adam")
        assert "0 Linear" in text
        assert f"next: lightning-pipes plan profile={tmp_path / 'p.json'}" in text
        made = ModelProfile.load(tmp_path / "p.json")
        assert made.has_split
        assert made.seconds(Kind.W, 0, 3) > 0

    def test_a_model_of_the_examples(self, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        settings = ("model=examples.models:make_gpt", "rows=2", "repeats=1")
        told = found(say, "profile", *settings, f"out={tmp_path / 'p.json'}")
        assert [each["name"] for each in told["layers"]] == [
            "0 Embedding",
            *(f"{n} Block" for n in range(1, 5)),
            "5 Sequential",
        ]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["model=tests.tune.factories:nothing"], "model=tests.tune.factories:nothing returned a str, not a module"),
            (["model=tests.tune.factories:no_example"], "model=tests.tune.factories:no_example: the input of"),
            (["model=tests.tune.factories:absent"], "model=tests.tune.factories:absent: module"),
            (["model=nowhere.at_all:f"], "model=nowhere.at_all:f: No module named 'nowhere'"),
            (["model=gpt"], "model=gpt is not the path of a function. Pass package.module:function, as in"),
            (["model=gpt:"], "model=gpt: is not the path of a function. Pass package.module:function, as in"),
            (["model=:make"], "model=:make is not the path of a function. Pass package.module:function, as in"),
            ([], "model= is not the path of a function. Pass package.module:function, as in"),
            (["model=tests.tune.factories:Lit", "device=gpu9"], "device=gpu9 can't be used here:"),
            (["model=tests.tune.factories:Lit", "optimizer=Adm"], "optimizer=Adm: torch.optim has no such optimizer"),
            (["model=tests.tune.factories:Lit", "rows=[0]"], "rows=[0]: needs a number from 1 to"),
            (["out=/nowhere/p.json"], "there is no folder /nowhere"),
        ],
    )
    def test_mistakes(
        self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        given = [*arguments] if any(a.startswith("out=") for a in arguments) else [*arguments, "out=/tmp/never.json"]
        assert refused(capsys, "profile", *given).startswith(said)
