"""Code that runs in programs that do not use this package, and that must never make them fail.

If this package is installed, some of its code runs in every program that imports Lightning or starts a Hydra app. The
trainer layer is imported together with Lightning, regardless of which of the two packages is imported first.

`Trainer(strategy="pipeline_1f1b")` and LightningCLI recognize a strategy only after its class has been defined, and
Lightning has no entry point for strategies. Therefore, `import lightning_pipes` has to be sufficient. It has to work
before and after the import of Lightning, and it must not import Lightning itself.
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
_warned: set[str] = set()


@contextmanager
def warn_on_error(feature: str) -> Iterator[None]:
    """Log an exception in the block, once per message, and continue after the block.

    Args:
        feature: the name of the feature that can't be used after an exception.
    """
    try:
        yield
    except Exception as error:  # any exception, because it would end the program
        text = f"{feature} of lightning_pipes can't be used: {type(error).__name__}: {error}"
        if text not in _warned:
            _warned.add(text)
            _log.warning(text)
            _log.debug("It was raised here:", exc_info=True)


_LIGHTNING_MODULE = "lightning.pytorch"
_FEATURE = "strategies 'pipeline_...'"


def load_trainer_with_lightning() -> None:
    """Import `lightning_pipes.trainer` now if Lightning is already imported, or otherwise right after Lightning."""
    if _LIGHTNING_MODULE in sys.modules:
        _load_trainer()
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """A finder that finds no modules but is notified when Lightning is imported. It removes itself afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIGHTNING_MODULE:
            return None
        with suppress(ValueError):  # another thread imports Lightning at the same time
            sys.meta_path.remove(self)
        spec = None  # Python continues with the next finder
        with warn_on_error(_FEATURE):
            spec = _then_load_trainer(find_spec(fullname))
        return spec


def _then_load_trainer(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Return the same spec, modified so that the trainer layer is imported after the module."""
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def execute_and_load(module: ModuleType) -> None:
            execute(module)
            _load_trainer()

        vars(spec.loader)["exec_module"] = execute_and_load
    return spec


def _load_trainer() -> None:
    with warn_on_error(_FEATURE):
        import_module("lightning_pipes.trainer")
