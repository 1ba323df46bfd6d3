"""One sibling of an array, and its like on other ranks."""
