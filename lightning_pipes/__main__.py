"""`python -m lightning_pipes` is `lightning-pipes`."""

from lightning_pipes.tune.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
