"""fairseq's trainer with one optimizer call for all parameters and, on a GPU, with captured steps."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from fairseq.data.iterators import EpochBatchIterating
from fairseq.trainer import Trainer
from torch import Tensor

from . import optim, step
from .graphs import CudaGraph, Graph, Pool

logger = logging.getLogger(__name__)

Logs = Sequence[dict[str, Any]]  # the criterion's, of each batch of an update


class Late:
    """Numbers of an update, on their way from the device to the host, which does not wait for them."""

    def __init__(self, logs: Logs, size: float, norm: Tensor):
        self.logs, self.size = logs, size
        tensors = [value for log in logs for value in log.values() if isinstance(value, Tensor)]
        numbers = torch.stack([x.detach().float().reshape(()) for x in (*tensors, norm)])
        self.numbers = torch.empty(numbers.shape, pin_memory=numbers.is_cuda)
        self.numbers.copy_(numbers, non_blocking=True)
        self.arrival = torch.cuda.Event() if numbers.is_cuda else None
        if self.arrival:
            self.arrival.record()

    def read(self) -> tuple[Logs, float, Tensor]:
        """The logs, the sample size and the norm of the gradients, on the host."""
        if self.arrival:
            self.arrival.synchronize()
        numbers = iter(self.numbers.tolist())
        logs = [{k: next(numbers) if isinstance(v, Tensor) else v for k, v in log.items()} for log in self.logs]
        return logs, self.size, torch.tensor(next(numbers))


class FlatTrainer(Trainer):
    """fairseq's trainer, with ``optim.FairseqAdam`` where it does what fairseq's does.

    On a GPU forward and backward are captured, see ``step``. Then the host reads numbers one update later, but those of
    an epoch's last update at once. So it also learns later that gradients are no numbers; the optimizer's kernel has
    left out that update.
    """

    #: the values of --optimizer for which ours is taken
    OPTIMIZERS: tuple[str, ...] = (optim.NAME,)
    #: makes a graph; None: a CUDA graph on a GPU, none on a CPU
    graph: Callable[[], Graph] | None = None
    #: the shapes of captured steps; None: made from the first epoch's batches
    table: list[step.Shape] | None = None

    _step: step.GraphedStep | None = None
    _batches: EpochBatchIterating | None = None
    _late: Late | None = None
    _unreported: tuple[Logs, float, Tensor] | None = None  # of the update before this one
    _norm_before: Tensor | None = None

    @property
    def graphed(self) -> step.GraphedStep:
        """The captured step, which the optimizer's first use makes."""
        assert self._step is not None, "the optimizer was not used yet"
        return self._step

    def _build_optimizer(self) -> None:
        name = self.cfg.optimizer._name
        self.task.__dict__.pop("train_step", None)
        self._step = None
        if name not in self.OPTIMIZERS:
            return super()._build_optimizer()
        params = chain(self.model.parameters(), self.criterion.parameters())
        reason = optim.unsuited(self.cfg, [x for x in params if x.requires_grad], list(self.model.modules()))
        if reason:
            logger.info("the optimizer is fairseq's own Adam: %s", reason)
            return super()._build_optimizer()
        logger.info("the optimizer updates all parameters in one call")
        with optim.flat_classes(name):
            super()._build_optimizer()
        graph = self.graph or (partial(CudaGraph, Pool()) if self.cuda else None)
        if graph is None:
            return None
        if self.data_parallel_world_size > 1 or self.quantizer is not None:
            reason = (
                "several processes train" if self.quantizer is None else "--quantization-config-path changes the model"
            )
            logger.warning("training steps are not captured: %s", reason)
            return None
        model, criterion = self.get_model(), self.get_criterion()
        self._step = step.GraphedStep(self.task, model, criterion, self._optimizer, table=self._shapes, graph=graph)
        self.task.train_step = self._step
        return None

    def get_train_iterator(self, *args: Any, **kwargs: Any) -> EpochBatchIterating:
        """As fairseq's."""
        self._batches = super().get_train_iterator(*args, **kwargs)
        return self._batches

    def _shapes(self) -> list[step.Shape] | None:
        if self.table is None and self._batches is not None:
            sizes = step.sizes_of(self._batches.dataset, self._batches.frozen_batches)
            self.table = None if sizes is None else step.table_of(sizes)
        return self.table

    @property
    def _is_lean(self) -> bool:
        """Whether steps are captured, so that waiting for a number would leave the GPU idle."""
        return self._step is not None and self._step.refused is None

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Clip; gives the norm, or that of the update before this one where numbers are read later.

        fairseq's scaler of float16 has to know its own update's norm: it decides on the next scale.
        """
        self._norm = super().clip_grad_norm(clip_norm)
        if self._late is not None:
            self._unreported, self._late = self._late.read(), None
            self._norm_before = self._unreported[2]
        if not self._is_lean or self._norm_before is None or getattr(self.optimizer, "scaler", None) is not None:
            return self._norm
        if not torch.isfinite(self._norm_before):  # fairseq raises an error next
            self.set_num_updates(self.get_num_updates() - 1)
        return self._norm_before

    def _reduce_and_log_stats(self, logs: Logs, size: float, norm: Tensor | None = None) -> dict[str, Any]:
        if norm is None or not self._is_lean:  # norm is None in validation
            return super()._reduce_and_log_stats(logs, size, norm)
        reports, self._unreported, self._late = [self._unreported], None, Late(logs, size, self._norm)
        if self._batches is not None and self._batches.end_of_epoch():
            last = self._late.read()
            reports.append(last)
            self._late, self._norm_before = None, last[2]
        output: dict[str, Any] = {}
        for report in filter(None, reports):
            output = super()._reduce_and_log_stats(*report)
        return output
