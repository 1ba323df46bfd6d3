"""The state of the user's module around its layers, and values that layers leave for the code after them."""
