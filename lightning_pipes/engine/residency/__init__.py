"""States that share a device by swapping."""
