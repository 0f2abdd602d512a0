"""A dense decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Names are those of `LlamaForCausalLM`.

Shapes in names: B sequences, T positions, D model width, H heads, K key/value heads, E head width, V vocabulary.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.core.targets import IGNORE

Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes in elements; `dropout` applies to the output of attention and of the SwiGLU."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    tied: bool = False
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` under which transformers loads the same weights as LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim // self.heads,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": None,
        }


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


def _rotate(x_BHTE: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    cos, sin = rotary
    low, high = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width, self.dropout = c.heads, c.kv_heads, c.dim // c.heads, c.dropout
        self.q_proj = nn.Linear(c.dim, c.heads * self.width, bias=False)
        self.k_proj = nn.Linear(c.dim, c.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(c.dim, c.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(c.heads * self.width, c.dim, bias=False)

    def forward(self, x_BTD: torch.Tensor, rotary: Rotary, mask: torch.Tensor | None) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        q = self.q_proj(x_BTD).view(B, T, self.heads, self.width).transpose(1, 2)
        k = self.k_proj(x_BTD).view(B, T, self.kv_heads, self.width).transpose(1, 2)
        v = self.v_proj(x_BTD).view(B, T, self.kv_heads, self.width).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            _rotate(q, rotary), _rotate(k, rotary), v, attn_mask=mask, is_causal=mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        return _drop(self, self.o_proj(out.transpose(1, 2).reshape(B, T, -1)))


class MLP(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.dim, bias=False)
        self.dropout = c.dropout

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return _drop(self, self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)))


def _drop(module: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, module.dropout, module.training) if module.dropout else x


class Block(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.post_attention_layernorm = RMSNorm(c.dim, c.norm_eps)

    def forward(self, x_BTD: torch.Tensor, rotary: Rotary, mask: torch.Tensor | None) -> torch.Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotary, mask)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Body(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)


class Decoder(nn.Module):
    """The model. Equal `seed` and config give equal values on every rank, whatever the global random state."""

    cos_TE: torch.Tensor
    sin_TE: torch.Tensor

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(("o_proj", "down_proj"))
                std = 0.02 / (2 * config.layers) ** 0.5 if residual else 0.02
                nn.init.normal_(module.weight, std=std, generator=generator)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        width = config.dim // config.heads
        speed = config.rope_theta ** (-torch.arange(0, width, 2).float() / width)
        angle = torch.outer(torch.arange(config.context).float(), speed)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos_TE", angle.cos(), persistent=False)
        self.register_buffer("sin_TE", angle.sin(), persistent=False)

    def forward(
        self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor | None = None, segments_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B, T, V]; or with targets the f32 sum of the cross entropy over targets that are not IGNORE (0-dim).

        `segments_BT` numbers the documents of each row. Attention stays inside a document, and positions start again
        at each: packed documents are computed as if they were alone.
        """
        x_BTD = self.model.embed_tokens(tokens_BT)
        rotary, mask = self._positions(tokens_BT, segments_BT, x_BTD.dtype)
        for layer in self.model.layers:
            x_BTD = layer(x_BTD, rotary, mask)
        logits = self.lm_head(self.model.norm(x_BTD))
        if targets_BT is None:
            return logits
        flat = logits.float().view(-1, logits.shape[-1])
        return F.cross_entropy(flat, targets_BT.reshape(-1), ignore_index=IGNORE, reduction="sum")

    def _positions(
        self, tokens_BT: torch.Tensor, segments_BT: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[Rotary, torch.Tensor | None]:
        """Rotary factors, and a mask where some row has more than one document. The path depends on the data alone."""
        T = tokens_BT.shape[1]
        if segments_BT is None or bool((segments_BT == segments_BT[:, :1]).all()):
            return (self.cos_TE[:T].to(dtype), self.sin_TE[:T].to(dtype)), None
        index_T = torch.arange(T, device=tokens_BT.device)
        starts_BT = torch.ones_like(segments_BT, dtype=torch.bool)
        starts_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
        first_BT = torch.where(starts_BT, index_T, 0).cummax(dim=1).values
        place_BT = index_T - first_BT
        cos, sin = (table[place_BT].unsqueeze(1).to(dtype) for table in (self.cos_TE, self.sin_TE))
        same = segments_BT.unsqueeze(2) == segments_BT.unsqueeze(1)
        causal = index_T.unsqueeze(1) >= index_T.unsqueeze(0)
        return (cos, sin), (same & causal).unsqueeze(1)
