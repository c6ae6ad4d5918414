"""Learners that compress their weight gradients (AdaComp, arXiv 1712.02679, and the methods it is
measured against).

`digits_adacomp`   4 learners on the embedded digits, AdaComp with bins of 50 (convolutions) and 500
                   elements; one CPU
                   core, about 6 seconds
`digits_kfac`      4 learners that precondition with K-FAC (SPD-KFAC's subject, arXiv 2107.06533);
                   one CPU core, about
                   15 seconds
`cifar_adacomp`    ResNet-18 on CIFAR-10, 8 learners, AdaComp
`cifar_powersgd`   ResNet-18 on CIFAR-10, 16 learners, PowerSGD of rank 2 with error feedback, in
                   PowerSGD's setting:
                   learning rate 0.1 x 16 with its warm-up left out is not stable, so 0.1 is kept

Hardware of the CIFAR presets: one GPU; minutes were not yet measured on one here. What to expect:
AdaComp's tables are not public in readable form, so no number is quoted; its claims are A1 to A4 of
`commsweep claims demo-gradients`. PowerSGD's volumes are: 1023 MiB an epoch dense, 243, 136 and 72
times less at rank 1, 2 and 4.
"""

from __future__ import annotations

from commsweep.config import Run
from commsweep.config.compressors.joint import AdaCompSpec
from commsweep.config.compressors.lowrank import PowerSGDSpec
from commsweep.config.feedback import AdaCompResidueSpec, ResidueSpec
from commsweep.config.gradients import Gradients
from commsweep.config.second_order import KFAC
from commsweep.config.training import SGDSpec

from .digits import DIGITS
from .resnet18 import CORRECTED

ADACOMP = Gradients(
    learners=4, exchange="allgather", compressor=AdaCompSpec(), feedback=AdaCompResidueSpec()
)

PRESETS: dict[str, Run] = {
    "digits_kfac": DIGITS.model_copy(
        update={
            "model": DIGITS.model.model_copy(update={"cuts": ()}),
            "grad": Gradients(learners=4),
            "kfac": KFAC(),
        }
    ),
    "digits_adacomp": DIGITS.model_copy(update={"grad": ADACOMP}),
    "cifar_adacomp": CORRECTED.model_copy(
        update={"grad": ADACOMP.model_copy(update={"learners": 8})}
    ),
    "cifar_powersgd": CORRECTED.model_copy(
        update={
            "optim": SGDSpec(lr=0.1, weight_decay=1e-4),
            "grad": Gradients(learners=16, compressor=PowerSGDSpec(rank=2), feedback=ResidueSpec()),
        }
    ),
}
