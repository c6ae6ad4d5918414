"""The components of a stage's training beside its learners: tied embeddings, clipping across
stages, and a confined subspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commsweep.component import Component, Moment, Pass
from commsweep.training.subspace import Confined


class TiedEmbeddings(Component):
    """First and last stage hold the token embeddings; each takes the sum of both gradients, the
    head's first.
    """

    def __init__(self, weight: nn.Parameter, first: bool, peer: int) -> None:
        """first: whether this is the first stage. peer: the process of the other one."""
        super().__init__()
        self._weight = [weight]  # in a list: it is the model's
        self.first, self.other = first, peer
        # of their own: where there are two stages, messages between them could be taken for these
        pair = sorted([dist.get_rank(), peer])
        group = dist.new_group(pair, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), "this process is in it"
        self.group = group
        self.sent = 0  # bytes

    def after_pass(self, moment: Moment, pass_: Pass) -> None:
        weight = self._weight[0]
        mine = weight.grad
        assert mine is not None, "a pass has ended"
        theirs = torch.empty_like(mine)
        # A process that waits here must not wait behind what it sends.
        both = [
            dist.P2POp(dist.irecv, theirs, self.other, self.group),
            dist.P2POp(dist.isend, mine, self.other, self.group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        self.sent += mine.numel() * mine.element_size()
        weight.grad = theirs + mine if self.first else mine + theirs


class ClippingAcrossStages:
    """Limits the norm over all stages' gradients, summed in the simulation's order."""

    def __init__(
        self,
        order: Sequence[str],
        named: Mapping[str, nn.Parameter],
        elsewhere: Tensor | None,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """order: names of all stages' parameters. named: those of this stage. elsewhere: the one
        of these that another stage counts.
        """
        self.order, self.named, self.elsewhere = order, named, elsewhere
        self.device, self.group = device, group

    def __call__(self, most: float) -> None:
        """Shorten the gradients of this stage to its part of a gradient of norm `most`."""
        norms = torch.zeros(len(self.order), device=self.device)
        for index, name in enumerate(self.order):
            parameter = self.named.get(name)
            if parameter is None or parameter.grad is None or parameter is self.elsewhere:
                continue
            norms[index] = torch.linalg.vector_norm(parameter.grad)
        dist.all_reduce(norms, group=self.group)  # each place has one owner: nothing is rounded
        factor = (most / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
        for parameter in self.named.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


class ConfinedStage(Component):
    """The weights of this stage that a subspace code confines."""

    def __init__(self, confined: Confined) -> None:
        super().__init__()
        self._confined = confined

    def after_step(self, moment: Moment) -> None:
        self._confined()
