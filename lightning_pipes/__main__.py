"""Run the command `lightning-pipes` with `python -m lightning_pipes`."""

from lightning_pipes.tune.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
