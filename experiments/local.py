"""Learners that train apart and exchange rarely (DiLoCo, arXiv 2311.08105, and what came after).

`sotu_nano_diloco`      `sotu_nano` on 4 learners: 16 AdamW steps of their own, then Nesterov (0.7,
                        0.9) on the mean of
                        what they moved by; one CPU core, about 10 seconds
`sotu_nano_streaming`   the same in two fragments of blocks and one of the rest, E3M0 codes, used
                        one step after they
                        were sent, half of one's own kept (Streaming DiLoCo, arXiv 2501.18512)
`sotu_nano_sparseloco`  1/64 of every tile of 64 x 64 in 2-bit codes, error feedback that decays by
                        0.95, a plain outer
                        step (SparseLoCo, arXiv 2508.15706); the published message is 146 times
                        smaller than dense
`sotu_nano_demo`        32 of 4096 places of every tile's DCT, and 32 of every 64 of a vector's,
                        exchanged every step,
                        the sign of what arrives (DeMo, arXiv 2411.19870; each learner's residue is
                        its momentum)
`sotu_nano_mesh`        2 learners of 2 stages and 2 microbatches each, both kinds of messages
                        compressed: TopK 20 % in
                        4 bits forward, its mask back in 2 unbiased bits, and SparseLoCo between the
                        learners; made for `commsweep pipeline sotu_nano_mesh`, four processes
`gpt2_diloco`           GPT-2 small from scratch, 8 learners, 30 steps apart; a GPU

The published settings are of models a thousand times larger; intervals here are shorter, because
trainings are.
"""

from __future__ import annotations

from commsweep.config import Run
from commsweep.config.compressors.sparse import ForwardMaskSpec, TopKSpec
from commsweep.config.compressors.values.levels import E3M0Spec, StatisticalSpec
from commsweep.config.compressors.values.quantize import UniformSpec
from commsweep.config.feedback import ResidueSpec
from commsweep.config.gradients import Gradients
from commsweep.config.links import Link
from commsweep.config.outer import Outer
from commsweep.config.training import SGDSpec

from .text import NANO
from .text import PRESETS as TEXT

DILOCO = Gradients(learners=4, outer=Outer(interval=16))
STREAMING = Gradients(
    learners=4,
    exchange="allgather",
    compressor=E3M0Spec(),
    compress_vectors=True,
    outer=Outer(interval=16, rate=0.4, fragments=2, overlap=1, local_share=0.5),
)
SPARSELOCO = Gradients(
    learners=4,
    exchange="allgather",
    compress_vectors=True,
    feedback=ResidueSpec(decay=0.95),
    compressor=TopKSpec(ratio=1 / 64, scope="tile", values=StatisticalSpec()),
    outer=Outer(interval=16, rate=1.0, momentum=0.0, nesterov=False),
)
DEMO = Gradients(
    learners=4,
    exchange="allgather",
    compress_vectors=True,
    feedback=ResidueSpec(decay=0.999),
    transform="dct",
    compressor=TopKSpec(ratio=32 / 4096, scope="tile", per_tile="number"),
    outer=Outer(interval=1, rate=1.0, momentum=0.0, nesterov=False, aggregate="senders", sign=True),
)
MESH = NANO.model_copy(
    update={
        "model": NANO.model.model_copy(update={"stages": 2}),
        "microbatches": 2,
        "fwd": Link(compressor=TopKSpec(ratio=0.2, values=UniformSpec(bits=4, scale="sample"))),
        "bwd": Link(
            compressor=ForwardMaskSpec(
                values=UniformSpec(bits=2, scale="group", rounding="stochastic")
            )
        ),
        "grad": SPARSELOCO.model_copy(update={"learners": 2}),
    }
)

PRESETS: dict[str, Run] = {
    "sotu_nano_diloco": NANO.model_copy(update={"grad": DILOCO}),
    "sotu_nano_streaming": NANO.model_copy(update={"grad": STREAMING}),
    "sotu_nano_sparseloco": NANO.model_copy(update={"grad": SPARSELOCO}),
    "sotu_nano_demo": NANO.model_copy(
        update={"grad": DEMO, "optim": SGDSpec(lr=1e-3, momentum=0.0, weight_decay=0.0)}
    ),
    "sotu_nano_mesh": MESH,
    "gpt2_diloco": TEXT["gpt2_scratch"].model_copy(
        update={"grad": DILOCO.model_copy(update={"learners": 8, "outer": Outer(interval=30)})}
    ),
}
