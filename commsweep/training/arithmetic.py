"""The precision of a Run's products, made and read back; a process computes in one at a time."""

from __future__ import annotations

import torch

from commsweep.config import Run
from commsweep.errors import UserError


def install(run: Run, device: torch.device) -> None:
    """Set how this process's products are computed: the same wherever a Run says the same. Raises
    UserError when the device has no such precision.
    """
    if run.precision == "tf32" and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        raise UserError(
            f"precision=tf32: {_called(device)} has none (a GPU of Ampere or later has); use "
            "precision=float32"
        )
    if run.precision == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError(f"precision=bfloat16: {_called(device)} has none; use precision=float32")
    for backend in (
        torch.backends.cuda.matmul,
        torch.backends.cudnn,
    ):  # cudnn's default would be tf32
        backend.allow_tf32 = run.precision == "tf32"  # pyright: ignore[reportAttributeAccessIssue]
    # Attention's other kernels sum gradients in the order they finish in.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def installed(autocast: torch.dtype) -> str:
    """A Run's precision as it is installed, given the type of autocast (float32: none)."""
    if autocast is torch.bfloat16:
        return "bfloat16"
    return (
        "tf32"
        if torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
        else "float32"
    )


def _called(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
