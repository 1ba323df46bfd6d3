"""What the user's code sees and may change: hooks, objects, and weights of other ranks."""
