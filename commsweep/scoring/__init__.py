"""A codec's score card: laws, real messages, speed, and what a training keeps of a message."""

from __future__ import annotations

ROLES = {
    "activations": "activations at a boundary between stages",
    "gradients": "gradients of activations at a boundary",
    "learners": "gradients of weights, exchanged by four learners every step",
    "pseudo-gradients": "what four learners moved by in 16 steps of their own",
}
