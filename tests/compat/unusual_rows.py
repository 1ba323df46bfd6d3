"""Rows about modules that are written in less usual ways."""

from __future__ import annotations

from functools import partial

from tests.compat import unusual_modules as m
from tests.compat.registry import row

odd = partial(row, "Less usual code")
for name, features in (
    ("a slice of the container", m.by_slice),
    ("children() of the container", m.by_children),
    ("a layer by its name", m.by_name),
):
    odd(f"{name} and all of it", module=partial(m.Features, features), reason="cut by units")
    odd(
        f"{name} and all of it, named container",
        module=partial(m.Features, features),
        strategy={"module": "model"},
        refused="or set PipelineStrategy(module=''), which cuts by units",
    )
odd("two slices of the container, one after the other", module=m.TwoSlices, strategy={"module": "model"})

WHOLE = "Call the transform in a layer, which one stage runs as a whole"
IN_STEP = "Call the transform in the forward of a module"
for name, transform in (
    ("grad", m.gradient),
    ("vjp", m.pulled_back),
    ("jvp", m.tangent),
    ("vmap of grad", m.mapped),
):
    odd(f"torch.func: {name} in layers", module=partial(m.Transforms, transform, "layers"))
    odd(f"torch.func: {name} after the layers", module=partial(m.Transforms, transform, "step"))
    odd(
        f"torch.func: {name} in modules, by units",
        module=partial(m.Transforms, transform, "layers"),
        strategy={"module": ""},
        evaluate=True,
    )
odd("torch.func: grad through the layers", module=partial(m.Transforms, m.gradient, "all"), refused=WHOLE)
for where in ("step", "all"):
    odd(
        f"torch.func: grad in a step by units{', through all layers' * (where == 'all')}",
        module=partial(m.Transforms, m.gradient, where),
        strategy={"module": ""},
        refused=IN_STEP,
    )
for way, strategy in (("", {}), (", by units", {"module": ""})):
    odd(
        f"complex weights, gradient_clip_val{way}",
        {"gradient_clip_val": 0.05},
        module=m.ComplexWeights,
        strategy=strategy,
    )
    odd(f"complex weights, clip_grad_norm_ in a hook{way}", module=m.ComplexClippedInHook, strategy=strategy)
states = partial(odd, module=m.Recurrent, loaders=m.loaders_of_eights)
for way, strategy in (("", {"module": "model"}), (", by units", {"module": ""})):
    states(
        f"a list of tuples of recurrent states on the module{way}, microbatches=1",
        strategy={"microbatches": 1, **strategy},
    )
    states(
        f"a list of tuples of recurrent states on the module{way}",
        strategy=strategy,
        refused="such as the states of recurrent layers, need PipelineStrategy(microbatches=1)",
    )
    for in_layers in (False, True):
        odd(
            f"pack_padded_sequence in {'layers' if in_layers else 'the step'}{way}",
            module=partial(m.Packing, in_layers),
            loaders=m.loaders_of_sequences,
            strategy=strategy,
        )
for way, strategy in (("", {}), (", by units", {"module": ""})):
    odd(
        f"a batch_sampler without a batch_size{way}",
        module=m.LitLoss,
        loaders=m.loaders_of_index_lists,
        strategy=strategy,
    )
    odd(f"trainer.train_dataloader.batch_size in the step{way}", module=m.ReadsLoader, strategy=strategy)
for later in (False, True):
    hooked = f"full backward hooks on layers without parts{', registered in on_train_start' * later}"
    for way, strategy in (("", {"module": "model"}), (", by units", {"module": ""})):
        odd(f"{hooked}{way}", module=partial(m.BackwardHooks, later), strategy=strategy)
odd("two attributes for one sparse tensor, one of them replaced by the step", module=m.TwoNames)
