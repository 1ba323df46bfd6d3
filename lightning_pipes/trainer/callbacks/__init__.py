"""Lightning callbacks of lightning_pipes."""
