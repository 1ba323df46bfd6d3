"""States that share a device: they are loaded when they are used, and offloaded to the host otherwise."""
