"""What the results of micro-batches add up to: losses, logs, returned and stored values."""
