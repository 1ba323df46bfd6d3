"""Gives each sibling its own copy of Hydra's process-wide state: HydraConfig and log handlers."""

from __future__ import annotations

import logging
import logging.config
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_pipes.arrays.siblings.sibling import current_sibling
from lightning_pipes.tune.private_hydra import hydra_singletons

_config: ContextVar[Any] = ContextVar("lightning_pipes_hydra_config")
_handlers: ContextVar[list[logging.Handler]] = ContextVar("lightning_pipes_log_handlers")


class _OwnConfig(HydraConfig):
    """`HydraConfig.get()` and `${hydra:...}` return the configuration of the calling sibling."""

    def __init__(self, outside: Any) -> None:
        self._outside = outside

    @property
    def cfg(self) -> Any:
        return _config.get(self._outside)

    @cfg.setter
    def cfg(self, value: Any) -> None:
        if current_sibling() is None:
            self._outside = value
        else:
            _config.set(value)


class _Router(logging.Handler):
    """Passes a record to the handlers of the calling sibling, or else to the original handlers."""

    def __init__(self, outside: list[logging.Handler]) -> None:
        super().__init__(logging.NOTSET)
        self._outside = outside

    def emit(self, record: logging.LogRecord) -> None:
        for handler in _handlers.get(self._outside):
            if record.levelno >= handler.level:
                handler.handle(record)


class _HandlersOnly(logging.config.DictConfigurator):
    """Creates the handlers of the root logger in a logging configuration, and changes no logger."""

    def make_handlers(self) -> list[logging.Handler]:
        makers = (
            ("formatters", self.configure_formatter),
            ("filters", self.configure_filter),
            ("handlers", self.configure_handler),
        )
        for kind, make in makers:
            made = self.config.get(kind) or {}
            for name in sorted(made):
                made[name] = make(made[name])
        root = self.config.get("root") or {}
        return [self.config["handlers"][name] for name in root.get("handlers") or ()]


@contextmanager
def own_hydra() -> Iterator[None]:
    """Give each sibling its own HydraConfig and log handlers inside the block."""
    instances = hydra_singletons()
    config, root = HydraConfig.instance(), logging.getLogger()
    handlers = root.handlers[:]
    instances[HydraConfig] = _OwnConfig(config.cfg)
    root.handlers[:] = [_Router(handlers)]
    try:
        yield
    finally:
        instances[HydraConfig] = config
        root.handlers[:] = handlers


@contextmanager
def own_logging(config: DictConfig | None, suffix: str) -> Iterator[None]:
    """Send this sibling's logs to the handlers that `hydra.job_logging` describes, inside the block.

    Args:
        suffix: put before the extension of their files, so that each rank has its own; one with a suffix leaves the
            console to rank 0, but for warnings.
    """
    settings: Any = None if config is None else OmegaConf.to_container(config, resolve=True)
    if not settings or not settings.get("root"):
        yield
        return
    for handler in (settings.get("handlers") or {}).values():
        if suffix and "filename" in handler:
            path = Path(handler["filename"])
            handler["filename"] = str(path.with_name(f"{path.stem}{suffix}{path.suffix}"))
    handlers = _HandlersOnly(settings).make_handlers()
    level = settings["root"].get("level")
    for handler in handlers:
        if level is not None and handler.level == logging.NOTSET:
            handler.setLevel(level)
        if suffix and not isinstance(handler, logging.FileHandler):
            handler.setLevel(max(handler.level, logging.WARNING))
    _handlers.set(handlers)
    try:
        yield
    finally:
        for handler in handlers:
            handler.close()
