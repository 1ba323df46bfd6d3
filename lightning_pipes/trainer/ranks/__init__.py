"""Who we are, and what ranks tell each other."""
