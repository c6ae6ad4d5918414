"""Callbacks for transformers.Trainer: codecs measured in shadow, gradients compressed, or inserted
boundaries kept in checkpoints.

trainer = transformers.Trainer(..., callbacks=[ShadowCallback(["topk:0.1", "uniform:4"])])
trainer.add_callback(CompressionCallback(trainer, {"kind": "powersgd", "rank": 2}, {"kind": "ef"}))
trainer.add_callback(BoundariesCallback(trainer, commsweep.insert(model, ...)))
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

from commsweep.boundary.insert import Inserted
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


class _Remembering(TrainerCallback):
    """Keeps what a process remembers beside each checkpoint, and finds it when the training resumes
    from there.
    """

    FILE = "commsweep"  # the beginning of a file's name

    def __init__(self, trainer: Trainer, label: str) -> None:
        """label: of what is remembered, in an error."""
        self.trainer, self.label = trainer, label
        train = trainer.train

        @wraps(train)  # callbacks are not told which checkpoint is resumed
        def noted(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._resumed = resume_from_checkpoint
            return train(resume_from_checkpoint, *args, **kwargs)

        self._resumed: str | bool | None = None
        trainer.train = noted

    def remembered(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps; None where there is nothing."""
        raise NotImplementedError

    def recall(self, args: Any) -> dict[str, Any]:
        """Return what the checkpoint that is resumed has of this process."""
        folder = self._resumed
        if folder is None or isinstance(folder, bool):
            folder = get_last_checkpoint(args.output_dir)
        file = Path(folder or args.output_dir) / self._name()
        if not file.exists():
            raise UserError(
                f"'{file}': the checkpoint has no state of {self.label}; resume one that was "
                "trained with this callback, by as many processes"
            )
        return torch.load(file, weights_only=True)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        remembered = self.remembered()
        if remembered is not None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(remembered, folder / self._name())

    def _name(self) -> str:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return f"{self.FILE}-{rank}.pt"


class BoundariesCallback(_Remembering):
    """Boundaries of `commsweep.insert` in a Trainer's model: their memories and counts lie beside
    each checkpoint. Without this callback a resumed training begins with empty ones.
    """

    FILE = "commsweep-boundaries"

    def __init__(self, trainer: Trainer, boundaries: Inserted) -> None:
        """trainer: the one that the callback is added to."""
        super().__init__(trainer, "inserted boundaries")
        self.boundaries = boundaries

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            self.boundaries.load_state_dict(self.recall(args))

    def remembered(self) -> dict[str, Any]:
        return self.boundaries.state_dict()


class CompressionCallback(_Remembering):
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
        super().__init__(trainer, "the compression hook")
        self.settings: dict[str, Any] = {"compressor": compressor, "feedback": feedback, **settings}
        self.hook: CompressionHook | None = None

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
            self.hook.load_state_dict(self.recall(args))
        self.hook.attach(wrapped)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.hook is not None and state.is_world_process_zero:
            notice(self.hook.report())

    def remembered(self) -> dict[str, Any] | None:
        return None if self.hook is None else self.hook.state_dict()
