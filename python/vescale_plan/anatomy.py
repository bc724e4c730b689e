"""What the parts of an HF-style decoder are called: layers, embeddings, projections, head."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple, cast

import torch
from torch import nn

from .strategy import PlanError

LAYER_LISTS = ("layers", "h", "blocks")
TOKEN_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
POSITION_EMBEDDINGS = ("wpe", "embed_positions")
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
HEADS = ("lm_head", "embed_out")
INPUT_DROPOUTS = ("drop",)

#: Sizes that only configurations with recurrent layers have (Nemotron-H, Qwen3-Next).
RECURRENT = ("mamba_num_heads", "linear_num_value_heads")
COLUMN = frozenset("q_proj k_proj v_proj gate_proj up_proj c_fc fc_in fc1 q k v".split())
ROW = frozenset("o_proj down_proj c_proj fc_out fc2 out_proj".split())
ATTENTIONS = frozenset("self_attn attn attention".split())
MLPS = frozenset("mlp feed_forward".split())
FUSED_QKV = frozenset(["c_attn"])


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is HF's `Conv1D`: a linear layer whose weight is stored (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_norm(module: nn.Module) -> bool:
    """Whether this is a normalisation over features."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("Norm")


@dataclasses.dataclass
class Anatomy:
    """Where the parts of a causal language model are."""

    model: nn.Module
    base: nn.Module
    base_name: str
    layers_name: str
    embedding_name: str
    positions_name: Optional[str]
    norm_name: Optional[str]
    dropout_name: Optional[str]
    head_name: Optional[str]

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return cast(nn.ModuleList, getattr(self.base, self.layers_name))

    @property
    def embedding(self) -> nn.Module:
        """The token embedding."""
        return cast(nn.Module, getattr(self.base, self.embedding_name))

    @property
    def embedding_weight(self) -> str:
        """Name of the token embedding's weight."""
        return f"{self.base_name}.{self.embedding_name}.weight"

    @property
    def head(self) -> Optional[nn.Module]:
        """The output projection."""
        return getattr(self.model, self.head_name) if self.head_name else None

    @property
    def tied(self) -> bool:
        """Whether the output projection and the token embedding share their weight."""
        head, embedding = getattr(self.head, "weight", None), getattr(self.embedding, "weight", None)
        return head is not None and head is embedding

    def tie(self) -> None:
        """Makes head and embedding share their weight again, after sharding replaced both."""
        setattr(self.head, "weight", self.embedding.weight)

    def attention_modules(self) -> Iterator[Tuple[str, nn.Module]]:
        """Every attention module of the layers."""
        for index, layer in enumerate(self.layers):
            for name, child in layer.named_children():
                if name in ATTENTIONS:
                    yield f"{self.base_name}.{self.layers_name}.{index}.{name}", child


def find(model: nn.Module) -> Anatomy:
    """Finds the parts of `model`.

    Raises `PlanError` when it does not look like an HF-style decoder.
    """

    def first(owner: nn.Module, names: Iterable[str]) -> Optional[str]:
        return next((n for n in names if isinstance(getattr(owner, n, None), nn.Module)), None)

    for base_name, base in model.named_children():
        layers = first(base, LAYER_LISTS)
        if layers is None or not isinstance(getattr(base, layers), nn.ModuleList):
            continue
        embedding = first(base, TOKEN_EMBEDDINGS)
        if embedding is None:
            known = ", ".join(TOKEN_EMBEDDINGS)
            raise PlanError(f"{type(model).__name__}: {base_name} has no token embedding (looked for {known})")
        return Anatomy(
            model=model,
            base=base,
            base_name=base_name,
            layers_name=layers,
            embedding_name=embedding,
            positions_name=first(base, POSITION_EMBEDDINGS),
            norm_name=first(base, FINAL_NORMS),
            dropout_name=first(base, INPUT_DROPOUTS),
            head_name=first(model, HEADS),
        )
    raise PlanError(
        f"{type(model).__name__}: no decoder layers found; expected a causal language model with a base model "
        f"that holds a ModuleList called {' or '.join(LAYER_LISTS)}"
    )


class SplitQkv(nn.Module):
    """GPT-2's fused query-key-value projection as three, so that each can be sharded by heads.

    The output is what the fused projection of this rank's heads would be.
    """

    q: nn.Module
    k: nn.Module
    v: nn.Module

    def __init__(self, fused: Any):
        super().__init__()
        width = fused.nf // 3
        parts = zip(("q", "k", "v"), fused.weight.split(width, dim=1), fused.bias.split(width))
        for name, weight, bias in parts:
            part = type(fused)(width, fused.nx) if fused.weight.device.type != "meta" else _meta_like(fused, width)
            part.weight = nn.Parameter(weight.detach().clone(), requires_grad=fused.weight.requires_grad)
            part.bias = nn.Parameter(bias.detach().clone(), requires_grad=fused.bias.requires_grad)
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q(x), self.k(x), self.v(x)), dim=-1)


def _meta_like(fused: Any, width: int) -> Any:
    with torch.device("meta"):
        return type(fused)(width, fused.nx)


def split_fused_qkv(parts: Anatomy) -> List[nn.Module]:
    """Splits every fused projection; returns the attention modules changed.

    This is done under every plan, so that checkpoints of different plans have the same names.
    """
    changed = []
    for name, attention in parts.attention_modules():
        for child_name, child in list(attention.named_children()):
            if child_name not in FUSED_QKV:
                continue
            if not is_conv1d(child) or not hasattr(attention, "split_size"):
                raise PlanError(f"{name}.{child_name}: cannot split a fused projection of type {type(child).__name__}")
            setattr(attention, child_name, SplitQkv(child))
            changed.append(attention)
    return changed


def check_heads(parts: Anatomy, degree: int, axis: str) -> None:
    """Refuses a degree that does not divide the heads, and layers whose heads are not split."""
    config = getattr(parts.model, "config", None)
    if any(getattr(config, field, None) for field in RECURRENT):
        raise PlanError(f"{axis}={degree}: layers with a recurrence are not split; plan with {axis}=1")
    counts: Dict[str, Optional[int]] = {
        "attention heads": getattr(config, "num_attention_heads", None),
        "key-value heads": getattr(config, "num_key_value_heads", None),
    }
    for what, count in counts.items():
        if count is not None and count % degree:
            divisors = [d for d in range(1, count + 1) if count % d == 0]
            nearest = min(divisors, key=lambda d: (abs(d - degree), d))
            raise PlanError(f"{axis}={degree} does not divide the model's {count} {what}; nearest that does: {nearest}")
