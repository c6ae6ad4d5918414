"""commsweep in trainings of others: measured in shadow, without a change to the training, or live.

    shadow.py        what each codec would do to the messages of any training loop
    measure.py       what a codec does to one tensor
    huggingface.py   a callback for transformers.Trainer
    lightning.py     a callback for pytorch_lightning.Trainer
    fsdp.py          FSDP2's gradients in codes
    pipelining.py    a stage of torch.distributed.pipelining
    outer.py         rare exchange, as a wrapper of an optimizer
    codecs/          codecs as files, for `commsweep export`

Each needs only the package that it is named after.
"""
