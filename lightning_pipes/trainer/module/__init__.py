"""The user's module: cut, and run around its layers."""
