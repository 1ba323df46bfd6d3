"""The setup of a run."""
