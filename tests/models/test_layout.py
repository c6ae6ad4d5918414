"""Networks with the channels last: the same function, and memory that stays whole."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from commsweep.models import layout

# glibc looks at every block it gives and takes; oneDNN uses what processors without AVX-512 have
CHECKED = {
    "LD_PRELOAD": "libc_malloc_debug.so.0",
    "MALLOC_CHECK_": "3",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}

TRAIN = """
import torch
from torch import nn
from commsweep.models import layout
for channels in (3, 4, 8):
    conv = layout.channels_last(nn.Conv2d(channels, 8, 1, stride=2, bias=False))
    for _ in range(300):
        conv(torch.randn(32, channels, 8, 8).contiguous(memory_format=torch.channels_last)).square().sum().backward()
        keep = [torch.empty(n) for n in (5, 9, 36, 72)]
"""


@pytest.mark.slow
def test_narrow_shortcuts_leave_the_heap_whole():
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], env=os.environ | CHECKED, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("channels", [3, 4, 8, 12, 16])
def test_the_weights_gradient_is_that_in_float64(channels):
    conv, x, slope = (
        nn.Conv2d(channels, 8, 1, stride=2, bias=False),
        torch.randn(32, channels, 8, 8),
        torch.randn(32, 8, 4, 4),
    )
    weight = conv.weight.detach().double().requires_grad_()
    nn.functional.conv2d(x.double(), weight, None, 2).backward(slope.double())
    layout.channels_last(conv)(x.contiguous(memory_format=torch.channels_last)).backward(slope)
    assert torch.allclose(conv.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "channels, stride, size", [(4, 2, 8), (3, 2, 7), (5, (1, 2), 6), (8, 2, 8), (4, 1, 8)]
)
def test_the_layout_changes_no_value(channels, stride, size):
    plain = nn.Conv2d(channels, 6, 1, stride=stride).double()
    placed = nn.Conv2d(channels, 6, 1, stride=stride).double()
    placed.load_state_dict(plain.state_dict())
    assert layout.channels_last(placed) is placed and list(placed.state_dict()) == list(
        plain.state_dict()
    )
    x = torch.randn(4, channels, size, size, dtype=torch.float64)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    ys = [plain(xs[0]), placed(xs[1].contiguous(memory_format=torch.channels_last))]
    slope = torch.randn_like(ys[0])
    grads = [
        torch.autograd.grad(y, [x, *conv.parameters()], slope)
        for x, y, conv in zip(xs, ys, (plain, placed), strict=True)
    ]
    assert torch.allclose(*ys, rtol=1e-12) and ys[0].shape == ys[1].shape
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*grads, strict=True))


def test_only_what_may_break_is_changed():
    kept = [
        nn.Conv2d(16, 4, 1, stride=2),
        nn.Conv2d(4, 4, 1),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 1, stride=2, groups=2),
        nn.Conv2d(4, 4, 1, stride=2, padding=1),
    ]
    changed = nn.Conv2d(4, 4, 1, stride=2)
    layout.channels_last(nn.Sequential(*kept, changed))
    assert all(type(conv) is nn.Conv2d for conv in kept) and isinstance(changed, layout.Thinned)
