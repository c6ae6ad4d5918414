"""A bucket in 16 bits: the bits and bytes of a message for each layer."""

import pytest
import torch
from torch import nn

from commsweep.collectives import mean
from commsweep.compressors import build
from commsweep.config.compressors.values.cast import CastSpec
from commsweep.data_parallel.hook import CompressionHook
from commsweep.data_parallel.narrow import NarrowBucket, stretches
from tests.data_parallel.test_hook import alone, data, model  # noqa: F401

LAYERS = [(6, True), (15, False), (4, False), (2, True), (9, False)]  # elements, travels wide


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("learners", [1, 2, 3])
def test_a_bucket_gives_the_bits_of_a_message_for_each_layer(to, scale, learners):
    draw = torch.Generator().manual_seed(learners)
    sizes = [size for size, _ in LAYERS]
    buffers = [
        torch.randn(sum(sizes), generator=draw) * 10.0 ** torch.randint(-8, 6, (1,), generator=draw)
        for _ in range(learners)
    ]
    buffers[0][8] = 1e6  # float16 saturates
    cast, rows = build(CastSpec(to=to)), []
    for buffer in buffers:
        rows.append(
            [
                part.clone() if wide else cast.apply(part[None] / scale)[0]
                for part, (_, wide) in zip(buffer.split(sizes), LAYERS, strict=True)
            ]
        )
    wanted = []
    for (_, wide), column in zip(LAYERS, zip(*rows, strict=True), strict=True):
        wanted.append(mean(list(column)) * (1.0 if wide else scale))
    views = list(buffers[0].split(sizes))
    layout = stretches(views[::-1], [wide for _, wide in LAYERS][::-1], buffers[0])
    assert [(part.start, part.stop) for part in layout] == [(0, 6), (6, 25), (25, 27), (27, 36)]
    bucket, arrived = NarrowBucket(layout, getattr(torch, to)), buffers[0].clone()
    bucket.average([bucket.pack(buffer, scale) for buffer in buffers], arrived, scale)
    assert torch.equal(arrived, torch.cat(wanted))
    buffers[-1][30] = torch.nan
    bucket.average([bucket.pack(buffer, scale) for buffer in buffers], arrived, scale)
    assert arrived.isinf().all()


def test_a_hook_in_16_bits_is_what_single_messages_give(alone):
    gradients, totals = [], []
    for whole in (True, False):
        torch.manual_seed(0)
        net = model()
        ddp, hook = nn.parallel.DistributedDataParallel(net), CompressionHook(net, "cast")
        if not whole:
            hook._cast = None
        hook.attach(ddp)
        x, y = data(0, 0)
        nn.functional.mse_loss(ddp(x), y).backward()
        assert bool(hook._narrow) == whole
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        totals.append(hook.totals())
    assert torch.equal(*gradients) and totals[0] == totals[1]
