"""Job arrays run sibling jobs through one shared pipeline."""
