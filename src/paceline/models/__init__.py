"""Models in plain torch, and how to build a user's own."""

from paceline.models.decoder import Decoder, DecoderConfig
from paceline.models.generate import generate
from paceline.models.target import build

__all__ = ["Decoder", "DecoderConfig", "build", "generate"]
