"""Code of ours that runs in programs which never asked for us, and must not end them.

A program that imports Lightning, or starts a Hydra app, where this package is installed runs some of it: the trainer
layer is loaded as soon as Lightning is, before or after us.

`Trainer(strategy="pipeline_1f1b")` and LightningCLI know a strategy only once its class exists, and Lightning has no
entry point for strategies. So `import lightning_pipes` has to do, in any order, without importing Lightning itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_log = logging.getLogger("lightning_pipes")
_told: set[str] = set()


@contextmanager
def harmless(what: str) -> Iterator[None]:
    """Logs an error in the block, once, and goes on behind it.

    Args:
        what: can't be used then.
    """
    try:
        yield
    except Exception as error:  # of any kind, or the program would end by it
        text = f"{what} of lightning_pipes can't be used: {type(error).__name__}: {error}"
        if text not in _told:
            _told.add(text)
            _log.warning(text)
            _log.debug("It was raised here:", exc_info=True)


_LIGHTNING = "lightning.pytorch"
_WHAT = "strategies 'pipeline_...'"


def load_trainer_with_lightning() -> None:
    """Import `lightning_pipes.trainer` now if Lightning is there, or else right after Lightning."""
    if _LIGHTNING in sys.modules:
        _load_trainer()
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds nothing itself; what it does is to be asked for Lightning, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIGHTNING:
            return None
        with suppress(ValueError):  # another thread has asked at the same time
            sys.meta_path.remove(self)
        spec = None  # Python goes on to ask others
        with harmless(_WHAT):
            spec = _then_load_trainer(find_spec(fullname))
        return spec


def _then_load_trainer(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Return the same, but that the trainer layer is loaded after the module."""
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def execute_and_load(module: ModuleType) -> None:
            execute(module)
            _load_trainer()

        vars(spec.loader)["exec_module"] = execute_and_load
    return spec


def _load_trainer() -> None:
    with harmless(_WHAT):
        import_module("lightning_pipes.trainer")
