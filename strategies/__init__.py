"""The schedules that ship with lightning_pipes, in one sub-package each. They are found by their entry points."""

if __name__ == "strategies":  # a second copy of every class would break isinstance
    raise ImportError("import lightning_pipes.strategies, not strategies")
