"""A transformers.Trainer with gradients in codes, two processes on CPU, and with boundaries: whole
and resumed.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from commsweep.errors import UserError
from tests.helpers import spawned

COMPRESSOR, FEEDBACK = {"kind": "topk", "ratio": 0.1}, {"kind": "ef"}


def trainer(folder, steps):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1,
        n_embd=16,
        n_head=2,
        vocab_size=50,
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    ids = torch.randint(50, (32, 16), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        save_steps=2,
        disable_tqdm=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
    )
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )


def _train(rank, port, said, folder, halves):
    from commsweep.integrations.huggingface import CompressionCallback

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for steps, checkpoint in halves:
        made = trainer(folder, steps)
        callback = CompressionCallback(made, COMPRESSOR, FEEDBACK)
        made.add_callback(callback)
        made.train(resume_from_checkpoint=checkpoint)
    weights = {name: p.tolist() for name, p in made.model.named_parameters()}
    said.put((rank, weights, callback.hook.totals()["up"], callback.hook.step))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_trainer_sends_codes_and_resumes_with_what_it_remembered(tmp_path):
    told = []
    earlier = str(tmp_path / "whole" / "checkpoint-2")
    for name, halves in (
        ("whole", [(4, None)]),
        ("halves", [(2, None), (4, True)]),
        ("whole", [(4, earlier)]),  # not the newest checkpoint of its folder
        ("elsewhere", [(4, earlier)]),
    ):
        folder = str(tmp_path / name)
        told.append({rank: rest for rank, *rest in spawned(_train, 2, folder, halves, answers=2)})
    whole, *others = told
    assert whole[0][0] == whole[1][0], "all processes have the same weights"
    for resumed in others:
        assert whole[0][0] == resumed[0][0], "a resumed training is the same bit for bit"
        assert resumed[0][2] == 4
    dense = 4 * sum(torch.tensor(p).numel() for p in whole[0][0].values())
    assert whole[0][1] < 0.3 * dense


def test_one_process_has_no_gradients_to_send(tmp_path):
    from commsweep.integrations.huggingface import CompressionCallback

    made = trainer(str(tmp_path), 1)
    made.add_callback(CompressionCallback(made, COMPRESSOR))
    with pytest.raises(UserError, match="GPT2LMHeadModel, which has no hook.*torchrun"):
        made.train()


def inserted(folder, steps, checkpoint):
    """(weights, calls) of a Trainer whose first block is a boundary with a memory."""
    import commsweep as cs
    from commsweep.integrations.huggingface import BoundariesCallback

    made = trainer(folder, steps)
    link = {"compressor": COMPRESSOR, "feedback": {"kind": "ef21"}}
    links, ids = {"transformer.h.0": {"fwd": link, "bwd": link}}, torch.zeros(2, 16).long()
    boundaries = cs.insert(made.model, links, sample=ids, batch_size=2)
    made.add_callback(BoundariesCallback(made, boundaries))
    made.train(resume_from_checkpoint=checkpoint)
    return made.model.state_dict(), boundaries.ledger()


def test_a_trainer_resumes_with_what_its_boundaries_remember(tmp_path):
    whole, counts = inserted(str(tmp_path / "whole"), 4, None)
    folder = str(tmp_path / "halves")
    inserted(folder, 2, None)
    weights, resumed = inserted(folder, 4, True)
    assert all(torch.equal(whole[name], weights[name]) for name in whole)
    assert resumed == counts
    (tmp_path / "halves" / "checkpoint-2" / "commsweep-boundaries-0.pt").unlink()
    with pytest.raises(UserError, match="no state of inserted boundaries"):
        inserted(folder, 4, f"{folder}/checkpoint-2")
