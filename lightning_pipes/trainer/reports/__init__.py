"""Reports on training runs."""
