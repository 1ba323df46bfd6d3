"""Hooks of the user's module on every stage."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipes.trainer.module.capture import Interceptor
from lightning_pipes.trainer.module.pipelined import CutModule
from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.step.hook_view import track_hooks
from lightning_pipes.trainer.step.hooks import wrap_module_hooks
from tests.trainer.lit import Lit


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("here", [True, False])
def test_what_a_hook_misses_on_other_stages_is_explained(here, overlaps):
    class Storing(Lit):
        def on_train_batch_end(self, *args: Any) -> None:
            self.last_loss.item()

    module = Storing()
    patches = Patches()
    wrap_module_hooks(module, patches, lambda hook: hook, here, overlaps, lambda: None, lambda: None)
    with pytest.raises(AttributeError, match="last_loss") as caught:
        module.on_train_batch_end(None, None, 0)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("on_train_batch_end runs on every rank" in notes) is not here
    assert ("after a flush" in notes) is (overlaps and not here)
    assert ("after the batch, if it can be sent" in notes) is not (overlaps or here)
    patches.close()
    assert not [name for name in vars(module) if name.startswith("on_")]


def test_a_hook_on_the_module_itself_comes_back():
    module, called = Lit(), []
    own: Any = lambda *_: called.append("hook")  # noqa: E731
    vars(module)["on_train_batch_end"] = own
    with Patches() as patches:
        track_hooks(module, [], CutModule(module, "model", [0], Interceptor("self.model")).scope, patches)
        wrap_module_hooks(module, patches, lambda hook: hook, True, False, lambda: called.append("agree"), lambda: None)
        module.on_train_batch_end(None, None, 0)
    assert called == ["hook", "agree"]
    assert vars(module)["on_train_batch_end"] is own
