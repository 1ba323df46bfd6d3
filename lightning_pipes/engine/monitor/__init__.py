"""Samples the device and the machine of a rank during training, to detect load from other programs."""
