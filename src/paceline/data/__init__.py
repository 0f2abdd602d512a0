"""From text to micro-batches; the order is a pure function of (seed, step) and knows no rank."""

from paceline.data.loader import Batch, Loader
from paceline.data.tokens import Corpus, prepare

__all__ = ["Batch", "Corpus", "Loader", "prepare"]
