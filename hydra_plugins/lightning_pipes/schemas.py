"""For any Hydra app: the schemas of lightning_pipes, `defaults: [/lightning_pipes/schema/schedule/kfkb@schedule]`, and
the resolver `${lightning_pipes.run_name:}`.

No `from __future__ import annotations` here: Hydra runs this module before it is in sys.modules.
"""

from lightning_pipes.harmless import harmless

with harmless("the configuration schemas"):
    from lightning_pipes.tune import run_name, schema

    schema.register()
    run_name.register()
