"""AdaComp's selection and its layout (Chen et al., arXiv 1712.02679; the method is covered by US
patent 11,295,208).

Public are the residue, the bins, the selection and that three values with one scale a layer are
sent. The scale, the layout and the treatment of bins of zeros are not; here:
scale    the mean of the bins' maxima, over the bins that are not all zero;
layout   an element is its place in the bin, a sign bit and a bit that ends the bin: one byte for
         bins of up to 64
         elements, two bytes above. This gives the published 40 (5 of 50) and 200 (5 of 500) at five
         elements a bin;
zeros    a bin that sends nothing is named in a bitmap of the bins, which travels only when there is
         such a bin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep.compressors.base import COMPRESSORS, Compressor, Field, Payload, payload
from commsweep.compressors.bits import pack, packed_bytes, unpack, unpack_flags
from commsweep.compressors.kernels import cpu, gpu
from commsweep.config.compressors.joint import AdaCompSpec
from commsweep.errors import UserError

SHORT = 64  # elements of a bin whose places fit into six bits


@COMPRESSORS.of(AdaCompSpec)
class AdaComp(Compressor[AdaCompSpec]):
    """The entries of every bin whose look-ahead H reaches the bin's largest |G|; they become
    +-scale.

    G: the residue with the new gradient d in it; H = G + ahead * d. nbytes = 1 + 4 + (1 or 2) *
    sent, and ceil(bins / 8) more when a bin sends nothing. Alone (without `ahead`) every bin sends
    its maximum.
    """

    def bin_size(self, shape: torch.Size) -> int:
        """Elements of a bin in a message [1, *layer]: convolutions have four dimensions of their
        own.
        """
        return self.spec.conv if len(shape) == 5 else self.spec.fc

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return self.look_ahead(x, x, 0.0)

    def look_ahead(self, g: Tensor, d: Tensor, ahead: float) -> Tensor:
        """Return what arrives for residue g [1, *layer] (new gradient d in it)."""
        size = self.bin_size(g.shape)
        return (
            self._torch(g.float().reshape(-1), d.float().reshape(-1), ahead, size)
            .to(g.dtype)
            .reshape(g.shape)
        )

    def step(self, e: Tensor, d: Tensor, ahead: float) -> tuple[Tensor, int | Tensor, int | Tensor]:
        """A learner's whole step for a layer: e <- e + d, send, e <- e - sent. Returns what
        arrives, its bytes, and how many entries it has.

        e, d: [*layer]. In two passes over memory where there are kernels.
        """
        size = self.bin_size(torch.Size([1, *e.shape]))
        kernel = next(
            (module for module in (cpu, gpu) if module.usable(e) and module.usable(d)), None
        )
        if kernel is not None and e.is_contiguous() and e.dtype == d.dtype == torch.float32:
            y, sent, empty = kernel.adacomp(e.view(-1), d.reshape(-1), ahead, size)
            bins = -(-e.numel() // size)
            return (
                y.view(e.shape),
                5 + sent * (1 if size <= SHORT else 2) + empty * packed_bytes(bins, 1),
                sent,
            )
        e += d
        y = self.look_ahead(e[None], d[None], ahead)[0]
        e -= y
        return y, self._bytes(y, size), torch.count_nonzero(y)

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        return self._bytes(y, self.bin_size(y.shape))

    @staticmethod
    def _torch(g: Tensor, d: Tensor, ahead: float, size: int) -> Tensor:
        short = -g.numel() % size
        bins = torch.nn.functional.pad(g, (0, short)).reshape(-1, size)
        top = bins.abs().amax(1, keepdim=True)
        h = bins + ahead * torch.nn.functional.pad(d, (0, short)).reshape(-1, size)
        keep = (h.abs() >= top) & (top > 0) & (bins != 0)
        count = torch.count_nonzero(top)
        scale = (top.sum(dtype=torch.float64) / count.clamp(min=1)).float()
        sent = torch.where(keep, torch.where(bins > 0, scale, -scale), 0.0)
        # a bad value stays visible
        return sent.where(top.isfinite(), torch.nan).reshape(-1)[: g.numel()]

    @staticmethod
    def _bytes(y: Tensor, size: int) -> Tensor:
        flat = torch.nn.functional.pad(y.reshape(-1), (0, -y.numel() % size)).reshape(-1, size)
        counts = torch.count_nonzero(flat, dim=1)
        return (
            counts.sum() * (1 if size <= SHORT else 2)
            + 5
            + (counts == 0).any() * packed_bytes(len(counts), 1)
        )

    def _encode(self, x: Tensor, seed: int) -> Payload:
        return self.pack(self.apply(x, seed))

    def pack(self, y: Tensor) -> Payload:
        """The payload of a message that arrives as y."""
        size = self.bin_size(y.shape)
        flat = torch.nn.functional.pad(y.reshape(-1), (0, -y.numel() % size)).reshape(-1, size)
        bins, columns = (flat != 0).nonzero(as_tuple=True)
        last = torch.ones_like(bins, dtype=torch.bool)
        last[:-1] = bins[1:] != bins[:-1]
        codes = columns * 4 + (flat[bins, columns] < 0) * 2 + last
        full = torch.zeros(len(flat), dtype=torch.bool, device=y.device).index_fill_(0, bins, True)
        fields = {
            "full": full.all().to(torch.uint8).reshape(1),
            "scale": y.abs().amax().float().reshape(1),
            "elements": pack(codes, 8 if size <= SHORT else 16),
        }
        return payload(y, **fields, **({} if full.all() else {"bins": pack(full, 1)}))

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        size = self.bin_size(shape)
        bins, width = -(-shape.numel() // size), 1 if size <= SHORT else 2
        form = {
            "full": Field(torch.uint8, (1,)),
            "scale": Field(torch.float32, (1,)),
            "elements": Field(torch.uint8, None, width * shape.numel()),
        }
        return [form, form | {"bins": Field(torch.uint8, (packed_bytes(bins, 1),))}]

    def _decode(self, payload: Payload) -> Tensor:
        size, n = self.bin_size(payload.shape), payload.shape.numel()
        fields, width = payload.parts, 8 if size <= SHORT else 16
        codes = unpack(fields["elements"], width, fields["elements"].numel() * 8 // width)
        n_bins = -(-n // size)
        which = torch.arange(n_bins, device=codes.device)
        if not int(fields["full"]):
            if "bins" not in fields:
                raise UserError("AdaComp's message lacks the bitmap of its bins")
            which = which[unpack_flags(fields["bins"], n_bins)]
        last = codes % 2
        offsets = last.cumsum(0) - last
        if int(last.sum()) != len(which) or not (
            (codes // 4 < size).all() and (offsets < len(which)).all()
        ):
            raise UserError("AdaComp's message names places outside its bins")
        bins = which[offsets]
        values = torch.where(codes // 2 % 2 == 1, -fields["scale"], fields["scale"]).to(
            payload.dtype
        )
        flat = torch.zeros(n_bins * size, dtype=payload.dtype, device=codes.device)
        return flat.index_put_((bins * size + codes // 4,), values)[:n].reshape(payload.shape)
