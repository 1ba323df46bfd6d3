"""Planning: assign layers to stages and batches to micro-batches. Nothing in this package imports torch."""
