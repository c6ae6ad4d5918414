"""Low-communication training: learners train apart and exchange rarely. `training.py` is what all
methods share; each method has a file of its own, beside its paper.

    diloco.py       DiLoCo: an outer SGD on what the learners have moved by
    streaming.py    Streaming DiLoCo: fragments of the model in turn, used later
    delayed.py      delayed averaging: a learner adds what it did in the meantime
    sparta.py       SPARTA: common weights only where something was sent
    noloco.py       NoLoCo: drawn pairs instead of all learners
    sparseloco.py   SparseLoCo: the mean over senders, and the clipping of long messages
    demo.py         DeMo: the sign of what arrives
    eager.py        a learner's own pseudo-gradient at once, the others' an exchange later
    desloc.py       DES-LOC: moments of the inner optimizers averaged at intervals of their own
"""
