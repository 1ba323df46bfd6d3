"""Job arrays: sibling jobs share one pipeline."""
