"""The schedules that ship with lightning_pipes, one sub-package each; entry points find them."""

if __name__ == "strategies":  # a second copy of every class would make isinstance fail
    raise ImportError("import lightning_pipes.strategies, not strategies")
