"""Callbacks for transformers.Trainer: codecs measured in shadow, or gradients compressed.

trainer = transformers.Trainer(..., callbacks=[ShadowCallback(["topk:0.1", "uniform:4"])])
trainer.add_callback(CompressionCallback(trainer, {"kind": "powersgd", "rank": 2}, {"kind": "ef"}))
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from commsweep.data_parallel.hook import CompressionHook
from commsweep.errors import UserError, notice
from commsweep.integrations.shadow import ShadowOfATraining


class ShadowCallback(ShadowOfATraining, TrainerCallback):
    """Looks from the first to the last step of a training, then writes a report."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # the Trainer's optimizer is wrapped by accelerate, which keeps the scaler of fp16 there
        self.begin(kwargs["model"], getattr(kwargs.get("optimizer"), "scaler", None))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end(state.is_world_process_zero)


class CompressionCallback(TrainerCallback):
    """Gradients between the processes of a Trainer in codes; what a process remembers lies beside
    each checkpoint and is read when the training resumes from it.
    """

    def __init__(
        self,
        trainer: Trainer,
        compressor: dict[str, Any] | str,
        feedback: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """trainer: the one that the callback is added to. The others: as of CompressionHook."""
        self.trainer = trainer
        self.settings: dict[str, Any] = {"compressor": compressor, "feedback": feedback, **settings}
        self.hook: CompressionHook | None = None
        self._note_resumed(trainer)

    def _note_resumed(self, trainer: Trainer) -> None:
        """Have `train` say which checkpoint it resumes, which callbacks are not told."""
        train = trainer.train

        @wraps(train)
        def noted(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._resumed = resume_from_checkpoint
            return train(resume_from_checkpoint, *args, **kwargs)

        self._resumed: str | bool | None = None
        trainer.train = noted

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wrapped = self.trainer.model_wrapped
        if isinstance(wrapped, torch._dynamo.OptimizedModule):
            raise UserError(
                "torch_compile=True hides the DistributedDataParallel that the compression hook "
                "belongs to: leave it out"
            )
        if not isinstance(wrapped, DistributedDataParallel):
            raise UserError(
                f"the Trainer's model is a {type(wrapped).__name__}, which has no hook for "
                "gradients: start the script with torchrun --nproc-per-node 2 (or more), without "
                "FSDP or DeepSpeed"
            )
        settings = {"scaler": self.trainer.accelerator.scaler} | self.settings
        self.hook = CompressionHook(wrapped.module, **settings)
        if state.global_step:
            self.hook.load_state_dict(torch.load(self._remembered(args), weights_only=True))
        self.hook.attach(wrapped)

    def _remembered(self, args: Any) -> Path:
        """Return the file of this process beside the checkpoint that is resumed."""
        folder = self._resumed
        if folder is None or isinstance(folder, bool):
            folder = get_last_checkpoint(args.output_dir)
        file = Path(folder or args.output_dir) / self._name()
        if not file.exists():
            raise UserError(
                f"'{file}': the checkpoint has no state of the compression hook; resume one "
                "that was trained with this callback, by as many processes"
            )
        return file

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.hook is not None and state.is_world_process_zero:
            notice(self.hook.report())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.hook is not None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.hook.state_dict(), folder / self._name())

    @staticmethod
    def _name() -> str:
        return f"commsweep-{dist.get_rank()}.pt"
