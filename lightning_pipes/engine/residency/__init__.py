"""States that take turns on a device."""
