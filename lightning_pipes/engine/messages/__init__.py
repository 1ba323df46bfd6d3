"""Messages between stages."""
