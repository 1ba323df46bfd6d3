"""Pipelines of models without a container of layers. Their steps are cut between units."""
