"""Warnings that are ignored, and all others, which are not shown more often for that."""

from __future__ import annotations

import warnings

import pytest

from lightning_pipes.trainer.ignoring import ignore_warnings


def test_what_is_shown_once_is_not_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
        for _ in range(3):
            ignore_warnings("not .* in a pipeline")
            for text in ("other", "not true in a pipeline"):
                warnings.warn(text, stacklevel=1)
    assert shown == ["other"]
