"""How a module is cut into stages, and how its steps run on them."""
