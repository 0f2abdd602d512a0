"""Checkpoints: by parameter name and interval, so that any stage and world size loads any other; tensors and JSON only."""

from paceline.checkpoint.export import export
from paceline.checkpoint.reader import load
from paceline.checkpoint.store import list_checkpoints, newest, verify
from paceline.checkpoint.writer import save

__all__ = ["export", "list_checkpoints", "load", "newest", "save", "verify"]
