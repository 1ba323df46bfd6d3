"""The schemas of lightning_pipes, for any Hydra app: `defaults: [/lightning_pipes/schema/schedule/kfkb@schedule]`.

No `from __future__ import annotations` here: Hydra runs this module before it is in sys.modules.
"""

from lightning_pipes.tune.schema import register

register()
