"""CompressedAD predicts a learner's next action from its history. The old part of the history is
compressed to latent tokens.

Shapes: B histories, L steps, D channels, K latents. A step is int (…, 4): `sizes.STEP_FIELDS`.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from recipes.compressed_ad.environment import NUM_ACTIONS
from recipes.compressed_ad.sizes import ModelSize

# keys and values of each layer, (B, heads, tokens, D / heads)
Cache = list[tuple[torch.Tensor, torch.Tensor]]


class Block(nn.Module):
    """Pre-norm attention and feed-forward layers; dropout on both results."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList([nn.LayerNorm(size.width), nn.LayerNorm(size.width)])
        self.attention_in = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.feedforward = nn.Sequential(
            nn.Linear(size.width, size.feedforward),
            nn.GELU(),
            nn.Linear(size.feedforward, size.width),
        )
        self.dropout = nn.Dropout(size.dropout)

    def forward(
        self,
        tokens: torch.Tensor,
        visible: torch.Tensor | None,
        past: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Map tokens (B, T, D) and return them with their keys and values, (B, heads, past + T, D /
        heads).

        `visible` is bool, (T, past + T) or (B, 1, T, past + T): whether a token sees another. None:
        all see all.
        """
        # (B, T, 3, heads, d)
        parts = self.attention_in(self.norms[0](tokens)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        tokens = tokens + self.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)))
        return tokens + self.dropout(self.feedforward(self.norms[1](tokens))), (key, value)


class CompressedAD(nn.Module):
    """An encoder that compresses old steps, stage by stage, and a causal decoder that predicts
    actions.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.step_embedding = nn.Linear(NUM_ACTIONS + 1 + 2 * 2 * size.grid_size, size.width)
        self.step_norm = nn.LayerNorm(size.width)
        self.place_embedding = nn.Linear(2 * size.grid_size, size.width)
        self.latent_queries = nn.Parameter(0.02 * torch.randn(size.latents, size.width))
        # The encoder's old latents, steps and new latents; the decoder's latents, then steps and
        # queries by their number.
        self.encoder_positions = nn.Parameter(
            0.02 * torch.randn(2 * size.latents + size.max_segment, size.width)
        )
        self.decoder_positions = nn.Parameter(
            0.02 * torch.randn(size.latents + size.max_recent + 1, size.width)
        )
        self.encoder = nn.ModuleList(Block(size) for _ in range(size.encoder_layers))
        self.encoder_norm = nn.LayerNorm(size.width)
        self.decoder_norm = nn.LayerNorm(size.width)
        self.decoder = nn.ModuleList(Block(size) for _ in range(size.decoder_layers))
        self.action_head = nn.Linear(size.width, NUM_ACTIONS)

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return action scores (B, queries, actions).

        All inputs are int: `recent` (B, L, 4), the last steps; `query_cells` (B, queries), the
        cells where the agent stands before each step that is scored, and last the cell after the
        window; `segments`, a list of (B, S, 4), oldest first; `segment_lengths` (B, stages). Both
        kinds of steps are padded at the end.
        """
        latents = None
        for stage, segment in enumerate(inputs["segments"]):
            latents = self.compress(latents, segment, inputs["segment_lengths"][:, stage])
        recent, cells = inputs["recent"], inputs["query_cells"]
        first_query = recent.shape[1] + 1 - cells.shape[1]
        tokens = torch.cat([self.prefix(latents, recent), self.query(cells, first_query)], 1)
        num_latents = 0 if latents is None else self.size.latents
        visible = training_mask(num_latents, recent.shape[1], first_query, tokens.device)
        for block in self.decoder:
            tokens, _ = block(tokens, visible)
        scores: torch.Tensor = self.action_head(tokens[:, -cells.shape[1] :])
        # DistributedDataParallel waits for a gradient of every parameter.
        if latents is None:
            unused = [
                *self.encoder.parameters(),
                *self.encoder_norm.parameters(),
                self.latent_queries,
            ]
            scores = scores + 0 * sum(weight.sum() for weight in [*unused, self.encoder_positions])
        return scores

    def compress(
        self, latents: torch.Tensor | None, steps: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return new latents (B, K, D) from the old ones, if any, and steps (B, S, 4); `lengths`
        (B,) of these are real.
        """
        batch, num_steps = steps.shape[:2]
        size, places = self.size, self.encoder_positions
        parts = [] if latents is None else [latents + places[: size.latents]]
        parts.append(self.embed_steps(steps) + places[size.latents : size.latents + num_steps])
        parts.append((self.latent_queries + places[-size.latents :]).expand(batch, -1, -1))
        tokens = torch.cat(parts, 1)
        visible = None
        if lengths is not None:
            is_real = torch.ones(batch, tokens.shape[1], dtype=torch.bool, device=steps.device)
            first = tokens.shape[1] - size.latents - num_steps
            is_real[:, first : first + num_steps] = (
                torch.arange(num_steps, device=steps.device) < lengths[:, None]
            )
            visible = is_real[:, None, None]
        for block in self.encoder:
            tokens, _ = block(tokens, visible)
        new: torch.Tensor = self.encoder_norm(tokens[:, -size.latents :])
        return new

    def embed_steps(self, steps: torch.Tensor) -> torch.Tensor:
        """Return tokens (B, L, D) of steps (B, L, 4)."""
        cell, action, reward, next_cell = steps.long().unbind(-1)
        parts = [
            self._place(cell),
            functional.one_hot(action, NUM_ACTIONS),
            reward[..., None],
            self._place(next_cell),
        ]
        tokens: torch.Tensor = self.step_norm(
            self.step_embedding(torch.cat(parts, -1).to(self.step_norm.weight))
        )
        return tokens

    def _place(self, cells: torch.Tensor) -> torch.Tensor:
        """Return the row and the column, one-hot each: int (…, 2 * grid_size).

        With a vector for each cell the model would learn by heart what to do in which goal cell,
        and know nothing of the goals of the test.
        """
        size = self.size.grid_size
        return torch.cat(
            [functional.one_hot(cells // size, size), functional.one_hot(cells % size, size)], -1
        )

    def prefix(self, latents: torch.Tensor | None, steps: torch.Tensor) -> torch.Tensor:
        """Return the decoder's tokens of latents, if any, and recent steps."""
        places = self.decoder_positions[: self.size.latents]
        old = [] if latents is None else [self.decoder_norm(latents) + places]
        return torch.cat([*old, self.step_tokens(steps, 0)], 1)

    def step_tokens(self, steps: torch.Tensor, first: int) -> torch.Tensor:
        """Return the decoder's tokens of recent steps (B, L, 4); the first step has the number
        `first`.
        """
        begin = self.size.latents + first
        tokens: torch.Tensor = self.decoder_norm(self.embed_steps(steps))
        return tokens + self.decoder_positions[begin : begin + steps.shape[1]]

    def query(self, cells: torch.Tensor, first: int) -> torch.Tensor:
        """Return the decoder's tokens for the cells (B, Q) before the recent steps number `first`
        and following.
        """
        begin = self.size.latents + first
        tokens: torch.Tensor = self.decoder_norm(
            self.place_embedding(self._place(cells.long()).to(self.step_norm.weight))
        )
        return tokens + self.decoder_positions[begin : begin + cells.shape[1]]


def training_mask(
    num_latents: int, num_steps: int, first_query: int, device: torch.device
) -> torch.Tensor:
    """Return the attention mask, bool (T, T), for the order latents, steps, queries from step
    `first_query` on.

    Latents see latents. A step sees latents, itself and earlier steps. A query sees latents,
    earlier steps and itself, so it predicts as if it were the only one, at the end; no other token
    sees it. Only padding sees the padding at the end.
    """
    numbers = torch.arange(num_steps, device=device)
    kinds = torch.cat([torch.full((num_latents,), -1, device=device), numbers])  # -1: a latent
    queries = torch.arange(first_query, num_steps + 1, device=device)
    body = kinds[None] <= kinds[:, None]
    of_queries = kinds[None] < queries[:, None]
    diagonal = torch.eye(len(queries), dtype=torch.bool, device=device)
    unseen = torch.zeros(len(kinds), len(queries), dtype=torch.bool, device=device)
    return torch.cat([torch.cat([body, unseen], 1), torch.cat([of_queries, diagonal], 1)])
