"""The plugins that lightning_pipes brings to every Hydra app of its environment. Hydra imports these modules: keep them
thin."""
