"""Layers that take turns on a stage's device: which will be needed next, and which to load and drop. Decisions only,
for who moves them."""
