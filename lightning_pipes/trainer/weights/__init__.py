"""How the weights of a rank are made, loaded and sharded."""
