"""What stands where the pipelined module stood: the layers of this rank, under their old names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.capture import Interceptor

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class StageProxy(nn.Module):
    """Registers only the layers that live here, so `parameters()`, `state_dict()` and `train()` see those; its length,
    order and indices are those of the whole module. Layers of other ranks can be looked at, with weights on `meta`.

    Args:
        full: the whole module; not registered.
        local: numbers of the layers that live here.
        call: what `forward` does.
    """

    def __init__(self, full: nn.Sequential, local: Iterable[int], call: Call) -> None:
        super().__init__()
        hidden = {"_full": full, "_call": call}
        self.__dict__.update(hidden)  # past nn.Module, which would register the whole module
        names = list(full._modules)
        for number in sorted(local):
            self._modules[names[number]] = full[number]
        self.train(full.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_call"](args, kwargs)

    def __len__(self) -> int:
        return len(self.__dict__["_full"])

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.__dict__["_full"])

    def __getitem__(self, index: int | slice) -> Any:
        return self.__dict__["_full"][index]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module; PipelineError for a step that wants all of them, as a penalty on all weights does."""
        yield from super().named_modules(memo, prefix, remove_duplicate)
        call = self.__dict__["_call"]
        if isinstance(call, Interceptor) and call.running and len(self._modules) < len(self):
            where = f"self.{prefix}" if prefix else "the pipelined module"
            raise PipelineError(
                f"a step goes through all modules or parameters of {where}, but only some of its layers are on "
                "this rank, and the sum over them would be another than on one process. Penalise weights by the "
                "optimizer's weight_decay; let layers hand what they add to the loss on with their output"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_full"], name)  # attributes of a subclass of nn.Sequential, foreign layers

    def __repr__(self) -> str:
        layers = self.__dict__["_full"].named_children()
        lines = [f"  ({n}): {m!r}" if n in self._modules else f"  ({n}): on another rank" for n, m in layers]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])
