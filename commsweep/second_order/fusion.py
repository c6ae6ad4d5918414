"""Groups tensors into messages, so that few messages start and little of them is waited for. No
torch.

A message of m elements takes alpha + beta m seconds. Tensors become ready one after the other; a
fusion says which neighbours make one message. Source of `pipelined`: the first author's code
(shyhuai/kfac_pytorch, `comm.py`), which takes the rule from MG-WFBP (the same group).
"""

from __future__ import annotations

from collections.abc import Sequence

Groups = list[list[int]]  # places of tensors, in the order in which they become ready


def after(elements: Sequence[int]) -> Groups:
    """Return a single group, sent once all are ready."""
    return [list(range(len(elements)))] if elements else []


def separate(elements: Sequence[int]) -> Groups:
    """Layer by layer, a message each."""
    return [[index] for index in range(len(elements))]


def threshold(elements: Sequence[int], most: int) -> Groups:
    """Neighbours as long as their sum stays within `most` elements (a communication library's
    buffer).
    """
    groups: Groups = []
    filled = 0
    for index, n in enumerate(elements):
        if groups and filled + n <= most:
            groups[-1].append(index)
            filled += n
        else:
            groups.append([index])
            filled = n
    return groups


def pipelined(elements: Sequence[int], ready: Sequence[float], alpha: float, beta: float) -> Groups:
    """SPD-KFAC's rule: a tensor waits for the next one when that is ready before its own message
    could begin, or when the wait is shorter than what starting another message takes.

    ready: seconds at which each tensor is there. One pass, greedy.
    """
    groups: Groups = [[0]] if elements else []
    free = 0.0  # when the link is
    size = elements[0] if elements else 0
    for index in range(len(elements) - 1):
        begins = max(free, ready[index])
        ends = begins + alpha + beta * size
        coming = ready[index + 1]
        if coming < ends and (coming < begins or coming - begins < alpha):
            groups[-1].append(index + 1)
            size += elements[index + 1]
        else:
            free = ends
            groups.append([index + 1])
            size = elements[index + 1]
    return groups


def groups(
    kind: str,
    elements: Sequence[int],
    ready: Sequence[float],
    alpha: float,
    beta: float,
    most: int = 2**24,
) -> Groups:
    """The groups of the fusion of that name: after, layer, threshold or pipelined."""
    if kind == "pipelined":
        return pipelined(elements, ready, alpha, beta)
    return (
        threshold(elements, most)
        if kind == "threshold"
        else {"after": after, "layer": separate}[kind](elements)
    )


def finished(
    groups: Groups, elements: Sequence[int], ready: Sequence[float], alpha: float, beta: float
) -> float:
    """Seconds at which the last message of these groups has arrived."""
    free = 0.0
    for group in groups:
        free = max(free, ready[group[-1]]) + alpha + beta * sum(elements[index] for index in group)
    return free
