"""Hooks, objects and weights of other ranks, as the user's code sees and changes them."""
