"""Kept entries of a given number."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from commsweep.config.compressors.base import Compression, IndexCoding, Ratio
from commsweep.config.compressors.values import ValueSpec


class Selection(Compression):
    """A compressor that keeps the same number of entries of every message; `values` codes those."""

    values: Annotated[
        ValueSpec | None,
        Field(discriminator="kind", description="how the kept values travel; absent: as they are"),
    ] = None


class TopKSpec(Selection):
    """Keep the `ratio` largest magnitudes of every sample, tile, last-dimension row, or of the
    tensor.

    Tiles are `tile` x `tile` entries of a sample as a matrix (its first dimension by all others),
    of fewer where sides do not divide; a vector is cut into runs of tile^2 (SparseLoCo).
    per_tile=number: smaller tiles keep as many entries as a whole one, and a vector is cut into
    runs of `tile` (DeMo). index_coding: Rice codes of the gaps between kept places, where they are
    shorter than indices and a bitmask.
    """

    label: ClassVar[str] = "TopK"
    cost: ClassVar[str] = "values + the smaller of packed indices and a bitmask"
    sparsifier: ClassVar[bool] = True
    own_places: ClassVar[bool] = True
    use: ClassVar[str] = (
        "Forward, with the same compressor at inference; for gradients, with error feedback."
    )
    kind: Literal["topk"] = "topk"
    ratio: Ratio = 0.1
    scope: Literal["sample", "tensor", "last", "tile"] = "sample"
    tile: Annotated[int | None, Field(ge=2, le=256, description="side of a tile; absent: 64")] = (
        None
    )
    per_tile: Annotated[
        Literal["number"] | None,
        Field(
            description=(
                "what a tile keeps: ratio x tile^2 entries, however small it is; absent: the "
                "share ratio"
            )
        ),
    ] = None
    index_coding: IndexCoding = None

    @model_validator(mode="after")
    def _tiled(self) -> TopKSpec:
        for name in ("tile", "per_tile"):
            if getattr(self, name) is not None and self.scope != "tile":
                raise ValueError(f"{name}={getattr(self, name)} has no effect unless scope=tile")
        return self


class Chosen(Compression):
    """Keeps entries of which the data say how many there are."""

    index_coding: IndexCoding = None


class TopKStrictSpec(Chosen):
    """The authors' TopK: drop the int(d*(1-ratio)) smallest and every entry equal to that
    threshold.
    """

    label: ClassVar[str] = "TopK"
    cost: ClassVar[str] = "as `topk`, by what is left"
    sparsifier: ClassVar[bool] = True
    own_places: ClassVar[bool] = True
    use: ClassVar[str] = (
        "To repeat the authors' numbers; elsewhere `topk`, whose bytes are known beforehand."
    )
    kind: Literal["topk_strict"] = "topk_strict"
    ratio: Ratio = 0.1


class RandomKSpec(Selection):
    """Keep `ratio` of the positions, drawn anew for every message; `scaled` multiplies by d/k
    (unbiased).
    """

    label: ClassVar[str] = "RandomK"
    cost: ClassVar[str] = "values + 8"
    sparsifier: ClassVar[bool] = True
    shared_draw: ClassVar[bool] = True
    summable: ClassVar[bool] = True
    use: ClassVar[str] = (
        "When learners' messages must add up on the way; `scaled` is unbiased, and noisy."
    )
    draws: ClassVar[bool] = True
    blind: ClassVar[bool] = True
    kind: Literal["randomk"] = "randomk"
    ratio: Ratio = 0.1
    scaled: bool = False


class RandTopKSpec(Selection):
    """TopK in which every kept place is, with probability `alpha`, a random one outside the top k
    instead.
    """

    label: ClassVar[str] = "RandTopK"
    cost: ClassVar[str] = "as `topk`"
    sparsifier: ClassVar[bool] = True
    use: ClassVar[str] = "When TopK leaves features unheard: some places are drawn from the rest."
    exchanged: ClassVar[bool] = False
    draws: ClassVar[bool] = True
    blind: ClassVar[bool] = True
    kind: Literal["randtopk"] = "randtopk"
    ratio: Ratio = 0.1
    alpha: Annotated[
        float, Field(ge=0, lt=1, description="chance that a kept place is not a top one")
    ] = 0.1
    scope: Literal["sample", "last"] = "sample"


class ForwardMaskSpec(Selection):
    """Backward only: keep the gradient where the forward sparsifier kept the activation; values
    travel alone.
    """

    label: ClassVar[str] = "forward's mask"
    cost: ClassVar[str] = "values only"
    shares_mask: ClassVar[bool] = True
    use: ClassVar[str] = "Backward beside a sparsifier forward: places cost nothing."
    exchanged: ClassVar[bool] = False
    kind: Literal["forward_mask"] = "forward_mask"
