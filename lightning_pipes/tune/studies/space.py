"""Converts Hydra's sweeps into Optuna's distributions, and values back into overrides."""

from __future__ import annotations

from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import BaseTrial, Trial

from lightning_pipes.ir import InputError


def distribution_from_override(override: Override) -> BaseDistribution | None:
    """Return the distribution of a sweep override; None where the override is one value.

    `interval(1, 2)` is a float, `int(interval(1, 10))` an integer with both ends, each with `tag(log, ...)` if wanted;
    `range(1, 8, step=2)` excludes 8, as everywhere in Hydra; `choice(a, b)` and `a,b` are one of these.

    Raises:
        InputError: another sweep, an unknown tag, or a logarithm of what is not positive.
    """
    if not override.is_sweep_override():
        return None
    sweep, key = override.value(), override.get_key_element()
    tags = set(getattr(sweep, "tags", ()))
    if tags - {"log"}:
        raise InputError(f"{key}: unknown tag {', '.join(sorted(tags - {'log'}))}; there is log")
    if isinstance(sweep, IntervalSweep):
        return _interval(key, sweep, "log" in tags)
    if tags:
        raise InputError(f"{key}: tag(log, ...) goes with interval(...) only, as in tag(log,interval(1e-4,1e-1))")
    if isinstance(sweep, RangeSweep) and not sweep.shuffle:
        return _range(list(override.sweep_iterator()), sweep.step)
    if isinstance(sweep, RangeSweep | ChoiceSweep):
        # Hydra's own spelling: other values would come back from "null", "1e3" or "a,b"
        pairs = zip(override.sweep_iterator(), override.sweep_string_iterator(), strict=True)
        return CategoricalDistribution([v if isinstance(v, bool | int | float) else text for v, text in pairs])
    raise InputError(
        f"{key}: Optuna can't search {override.input_line!r}; there is interval, int(interval), range, choice"
    )


def _interval(key: str, sweep: Any, log: bool) -> BaseDistribution:
    low, high = sweep.start, sweep.end
    if log and low <= 0:
        raise InputError(f"{key}: a logarithmic interval starts above 0, not at {low}")
    if low > high:
        raise InputError(f"{key}: interval({low}, {high}) is empty; give the smaller number first")
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(float(low), float(high), log=log)


def _range(values: list[Any], step: Any) -> BaseDistribution:
    low, high = min(values), max(values)
    if all(isinstance(value, int) for value in values):
        return IntDistribution(low, high, step=abs(int(step)))
    return FloatDistribution(low, high, step=abs(float(step)))


def suggest(trial: BaseTrial | Trial, name: str, among: BaseDistribution) -> Any:
    """Suggest a value for a parameter."""
    if isinstance(among, IntDistribution):
        return trial.suggest_int(name, among.low, among.high, step=among.step, log=among.log)
    if isinstance(among, FloatDistribution):
        return trial.suggest_float(name, among.low, among.high, step=among.step, log=among.log)
    assert isinstance(among, CategoricalDistribution)
    return trial.suggest_categorical(name, among.choices)
