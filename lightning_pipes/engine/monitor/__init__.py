"""Samples a rank's device and machine during training, to detect other load."""
