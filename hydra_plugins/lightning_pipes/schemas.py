"""For any Hydra app: the schemas of lightning_pipes, `defaults: [/lightning_pipes/schema/schedule/kfkb@schedule]`, and
the resolver `${lightning_pipes.run_name:}`.

No `from __future__ import annotations` here: Hydra runs this module before it is in sys.modules.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_pipes.harmless import harmless

with harmless("the configuration schemas"):
    from lightning_pipes.tune import run_name, schema

    schema.register()
    run_name.register()


class Schemas(SearchPathPlugin):
    """Makes Hydra import this module where it finds plugins by entry points; adds no path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        pass
