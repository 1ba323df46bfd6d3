"""The first batches of a training beside one plain process of Lightning."""
