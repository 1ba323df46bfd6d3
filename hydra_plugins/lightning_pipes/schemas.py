"""The schemas of lightning_pipes and the resolver `${lightning_pipes.run_name:}`, for any Hydra app.

An app uses a schema with, for example, `defaults: [/lightning_pipes/schema/schedule/kfkb@schedule]`.

This module does not use `from __future__ import annotations`, because Hydra runs it before it is in sys.modules.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_pipes.import_hook import warn_on_error

with warn_on_error("the configuration schemas"):
    from lightning_pipes.tune import run_name, schema

    schema.register()
    run_name.register()


class Schemas(SearchPathPlugin):
    """A plugin that adds no search path.

    It exists so that Hydra imports this module if it finds plugins by entry points.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        pass
