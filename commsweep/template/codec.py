"""A compressor of your own. Use it wherever a compressor is named:

commsweep run digits fwd.compressor=codec.py:RowSigns,k=4
commsweep sweep launch mine --base digits --codecs "codec.py:RowSigns,k=1; codec.py:RowSigns,k=8"
"""

import torch

from commsweep.compressors.bits import pack, unpack


class RowSigns:
    """Sends the signs of the k largest entries of each row, and one scale a row."""

    gpu = True  # works on tensors of any device

    def __init__(self, k=8):
        self.k = k

    def encode(self, x, seed):
        """Return exactly what travels: a dict of tensors, whose sizes are the message's bytes."""
        rows = x.reshape(len(x), -1).float()
        k = min(self.k, rows.shape[1])
        positions = rows.abs().topk(k).indices
        values = rows.gather(1, positions)
        signs = pack((values >= 0).int(), bits=1)
        scale = values.abs().mean(1)
        return {"positions": positions.to(torch.int32), "signs": signs, "scale": scale}

    def decode(self, parts, like):
        """Return a tensor of like's shape and type; like's values are zeros."""
        rows = torch.zeros(len(like), like[:1].numel(), device=like.device)
        positions, scale = parts["positions"].long(), parts["scale"][:, None]
        signs = unpack(parts["signs"], bits=1, count=positions.numel()).view(positions.shape)
        rows.scatter_(1, positions, (2.0 * signs - 1) * scale)
        return rows.reshape(like.shape).to(like.dtype)
