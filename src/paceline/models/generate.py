"""Sampling, the plain way: one forward a token."""

import torch
from torch import nn


@torch.no_grad()
def generate(
    model: nn.Module, tokens: list[int], count: int, *, context: int, temperature: float = 1.0, seed: int = 0,
    stop: int | None = None,
) -> list[int]:  # fmt: skip
    """`count` more tokens after `tokens`, fewer if `stop` is drawn. Temperature 0 takes the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    out = list(tokens)
    for _ in range(count):
        logits = model(torch.tensor([out[-context:]]))[0, -1].float()
        if temperature == 0:
            drawn = int(logits.argmax())
        else:
            drawn = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if drawn == stop:
            break
        out.append(drawn)
    return out[len(tokens) :]
