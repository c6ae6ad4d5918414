"""Low-communication training: learners train apart and exchange rarely. `training.py` is what all
methods share, `roles.py` says what a method may decide; each method has a file, found by its being
there, beside its paper.

    roles.py        DiLoCo: an outer SGD on what the learners have moved by; the base of all others
    streaming.py    Streaming DiLoCo: fragments of the model in turn, used later
    delayed.py      delayed averaging: a learner adds what it did in the meantime
    sparta.py       SPARTA: common weights only where something was sent
    noloco.py       NoLoCo: drawn pairs instead of all learners
    sparseloco.py   SparseLoCo: the mean over senders, and the clipping of long messages
    demo.py         DeMo: the sign of what arrives
    eager.py        a learner's pseudo-gradient at once, the others' an exchange later
    desloc.py       DES-LOC: moments of the inner optimizers averaged at intervals of their own
"""

from commsweep.config.base import define

define(__name__, __file__)
