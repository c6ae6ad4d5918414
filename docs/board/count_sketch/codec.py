"""The count sketch (Charikar, Chen and Farach-Colton 2002), as FetchSGD (Rothchild et al., ICML
2020) sends gradients.

Every entry is added, with a drawn sign, to a drawn counter in each of `rows` rows. An entry is read
back as the median over rows of its counters, with its signs. Both ends draw from a seed, which
travels. FetchSGD then keeps the largest entries only; here all are used.
"""

from __future__ import annotations

import torch
from torch import Tensor


class CountSketch:
    """A table of `rows` rows with `ratio` times as many counters, in total, as the message has
    numbers.
    """

    def __init__(self, ratio: float = 0.1, rows: int = 3) -> None:
        self.ratio, self.rows = ratio, rows

    def encode(self, x: Tensor, seed: int) -> dict[str, Tensor]:
        """Return the counters of a message and the seed of its places and signs."""
        flat = x.reshape(-1).float()
        columns = max(1, round(self.ratio * flat.numel() / self.rows))
        drawn = torch.tensor([seed], dtype=torch.int64)
        places, signs = _draw(drawn, self.rows, columns, flat)
        table = flat.new_zeros(self.rows, columns)
        table.scatter_add_(1, places, signs * flat)
        return {"table": table, "seed": drawn.to(x.device)}

    def decode(self, parts: dict[str, Tensor], like: Tensor) -> Tensor:
        """Return the estimates of all entries."""
        table = parts["table"]
        flat = torch.empty(like.numel(), device=table.device)
        places, signs = _draw(parts["seed"], *table.shape, flat)
        estimates = (table.gather(1, places) * signs).median(0).values
        return estimates.reshape(like.shape).to(like.dtype)


def _draw(seed: Tensor, rows: int, columns: int, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return (places, signs) of the entries in each row, [rows, entries] each."""
    generator = torch.Generator().manual_seed(int(seed))
    shape = rows, flat.numel()
    places = torch.randint(0, columns, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0
    return places.to(flat.device), signs.to(flat.device)
