"""Hydra plugins that lightning_pipes adds to every Hydra app in its environment.

Hydra imports these modules at the start of each app, so they must stay small.
"""
