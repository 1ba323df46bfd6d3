"""The user's steps and hooks."""
