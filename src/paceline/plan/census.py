"""Sizes of a decoder by arithmetic: its parameters, its largest unit, what a micro-batch keeps for backward."""

from dataclasses import dataclass

from paceline.recipe import DecoderModel, Recipe

__all__ = ["Census", "activation_bytes", "decoder_census", "recipe_census"]


@dataclass(frozen=True, slots=True)
class Census:
    """Element counts of a model: all parameters, and those of its largest unit (one block, or the rest)."""

    parameters: int
    largest_unit: int


def decoder_census(model: DecoderModel, vocab_size: int) -> Census:
    """Count the parameters of our decoder: embedding, blocks (attention, SwiGLU, two norms), last norm, head."""
    kv_dim = model.dim // model.heads * model.kv_heads
    block = 2 * model.dim * model.dim + 2 * model.dim * kv_dim + 3 * model.dim * model.ffn + 2 * model.dim
    rest = vocab_size * model.dim * (1 if model.tied else 2) + model.dim
    return Census(model.layers * block + rest, max(block, rest))


def recipe_census(recipe: Recipe) -> Census | None:
    """Count the parameters a recipe asks for; None if only building the model tells (kind target)."""
    if isinstance(recipe.model, DecoderModel):
        return decoder_census(recipe.model, recipe.data.tokenizer.vocab_size)
    return None


def activation_bytes(model: DecoderModel, vocab_size: int, tokens: int, *, element: int, remat: str) -> int:
    """Estimate the bytes that the forward of `tokens` tokens keeps for its backward.

    A block keeps the inputs of its two norms, of its projections and of attention (about 6 x dim, keys and values) and four
    tensors of the SwiGLU; with remat only its input, plus one block while that is recomputed. The head keeps logits in the
    compute dtype and twice in f32 (the loss and its gradient). In the spirit of Korthikanti et al., arXiv 2205.05198.
    """
    kv_dim = model.dim // model.heads * model.kv_heads
    block = tokens * element * (6 * model.dim + 2 * kv_dim + 4 * model.ffn)
    head = tokens * vocab_size * (element + 8)
    if remat == "full":
        return model.layers * tokens * element * model.dim + block + head
    return model.layers * block + head
