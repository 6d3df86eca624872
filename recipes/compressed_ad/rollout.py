"""Rollouts in context: the model acts in unknown rooms and learns from its own steps, without
training.
"""

import numpy as np
import torch

from recipes.compressed_ad.environment import NUM_ACTIONS, Darkroom
from recipes.compressed_ad.model import Cache, CompressedAD, training_mask


class InContext:
    """The state of N rollouts: latents, recent steps, and the decoder's keys and values of both."""

    def __init__(
        self, model: CompressedAD, num_rollouts: int, most_recent: int, segment: int
    ) -> None:
        self.model = model.eval()
        self.most_recent = most_recent
        self.segment = segment
        self.latents: torch.Tensor | None = None
        self.recent = torch.zeros(num_rollouts, 0, 4, dtype=torch.uint8)
        self.cache: Cache = []

    def scores(self, cells: torch.Tensor) -> torch.Tensor:
        """Return action scores (N, actions) in cells (N,), after all steps so far."""
        tokens, _ = self._decoded(self.model.query(cells[:, None], self.recent.shape[1]), None)
        scores: torch.Tensor = self.model.action_head(tokens[:, 0])
        return scores

    def observe(self, steps: torch.Tensor) -> None:
        """Append a step (N, 4).

        When there are `most_recent`, the oldest `segment` are compressed (AD: forgotten).
        """
        self.recent = torch.cat([self.recent, steps[:, None]], 1)
        if self.recent.shape[1] < self.most_recent:
            _, self.cache = self._decoded(
                self.model.step_tokens(steps[:, None], self.recent.shape[1] - 1), None
            )
            return
        if len(self.model.encoder):
            self.latents = self.model.compress(self.latents, self.recent[:, : self.segment])
        self.recent = self.recent[:, self.segment :]
        self.cache = []
        num_latents = 0 if self.latents is None else self.latents.shape[1]
        num_steps = self.recent.shape[1]
        # without the query
        visible = training_mask(num_latents, num_steps, num_steps, steps.device)[:-1, :-1]
        _, self.cache = self._decoded(self.model.prefix(self.latents, self.recent), visible)

    def _decoded(
        self, tokens: torch.Tensor, visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, Cache]:
        """Pass tokens through the decoder, after those in the cache; return them and the cache that
        holds them, too.
        """
        cache: Cache = []
        for number, block in enumerate(self.model.decoder):
            tokens, kept = block(tokens, visible, self.cache[number] if self.cache else None)
            cache.append(kept)
        return tokens, cache


@torch.inference_mode()
def roll_out(
    model: CompressedAD,
    room: Darkroom,
    num_episodes: int,
    *,
    most_recent: int,
    segment: int,
    seed: int,
) -> np.ndarray:
    """Return the return of each episode, float64 (rooms, episodes); actions are drawn from the
    model's probabilities.
    """
    generator = torch.Generator().manual_seed(seed)
    context = InContext(model, len(room.goals), most_recent, segment)
    returns = np.zeros((len(room.goals), num_episodes))
    for episode in range(num_episodes):
        for _ in range(room.horizon):
            cells = room.cells
            chances = context.scores(torch.from_numpy(cells)).softmax(-1)
            actions = torch.multinomial(chances, 1, generator=generator)[:, 0].numpy()
            reached, rewards, _ = room.step(actions)
            returns[:, episode] += rewards
            context.observe(
                torch.from_numpy(np.stack([cells, actions, rewards, reached], 1)).byte()
            )
    return returns


def random_returns(room: Darkroom, num_episodes: int, seed: int) -> np.ndarray:
    """Return the same for actions drawn at random."""
    generator = np.random.default_rng(seed)
    steps = [
        room.step(generator.integers(NUM_ACTIONS, size=len(room.goals)))[1]
        for _ in range(num_episodes * room.horizon)
    ]
    return (
        np.stack(steps, 1).reshape(len(room.goals), num_episodes, room.horizon).sum(2).astype(float)
    )
