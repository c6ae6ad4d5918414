"""A codec of one's own in a sweep, beside TopK, dense and nothing sent.

    python examples/own_codec.py

Prints, with other numbers on another machine:

                  method  test_on_acc  bytes.ratio
                   dense     0.963889     1.000000
      gradients: nothing     0.886111     0.500000
        gradients: Signs     0.958333     0.517299
    gradients: TopK 10 %     0.911111     0.563442
"""

from pathlib import Path

import torch

import commsweep as cs
from commsweep.compressors.bits import pack, unpack
from commsweep.launching import codecs


class Signs:
    """Sends the sign of every entry, one bit each, and the mean size of a sample's entries."""

    def encode(self, x, seed):
        rows = x.reshape(len(x), -1).float()
        return {"signs": pack((rows >= 0).int().flatten(), bits=1), "size": rows.abs().mean(1)}

    def decode(self, parts, like):
        signs = unpack(parts["signs"], bits=1, count=like.numel()).view(len(like), -1)
        return ((2.0 * signs - 1) * parts["size"][:, None]).reshape(like.shape).to(like.dtype)


if __name__ == "__main__":
    torch.set_num_threads(1)
    base = cs.preset("digits", epochs=2, schedule__t_max=2, eval_every=2)
    words = [f"{Path(__file__).resolve()}:Signs", "topk:0.1"]
    rows = cs.sweep(codecs.runs(base, words, ["gradients"]), store="out/example_store")
    print(rows[["method", "test_on_acc", "bytes.ratio"]].to_string(index=False))
