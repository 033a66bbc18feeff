"""Training steps as CUDA graphs: forward, criterion and backward of a shape are captured once and replayed.

A step of a small model takes a GPU less time than the host needs to launch its 1,500 kernels; a replay is one launch.
``GraphedStep`` stands in the place of ``task.train_step``. Accumulation, clipping, loss scaling, logging, checkpoints
and batches stay fairseq's. Each batch is copied into static tensors of the cheapest shape that holds it.

Axes: B sentences, S source tokens, T target tokens.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy_with_rdrop import RdropLabelSmoothedCrossEntropyCriterion
from fairseq.data import Dictionary, FairseqDataset, LanguagePairDataset
from fairseq.modules import LayerDropModuleList
from fairseq.optim import FairseqOptimizer
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from evolving_attention.kernels import refusals
from evolving_attention.private import has_hooks

from .graphs import Graph, HostRead, NoReads
from .optim import FairseqAdam
from .recording import capturing
from .transformer import EvolvingModel

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int]  # B, S, T
Sample = dict[str, Any]  # a batch as fairseq collates it
#: shapes of an epoch; 64 add a tenth to the GPU's work at 4,096 tokens, 24 a quarter
SHAPES = 64
#: criteria whose tensors are sums over the batch, and whose other numbers are ``GraphedStep.counts``
CRITERIA = (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion, RdropLabelSmoothedCrossEntropyCriterion)
INPUTS = ("src_tokens", "src_lengths", "prev_output_tokens")


def cost(shapes: numpy.ndarray) -> numpy.ndarray:
    """About the GPU's time for shapes, N x 3: linear layers, the output projection on the target's side, and maps."""
    b, s, t = shapes.T.astype(float)
    return b * (s + 1.9 * t) + 0.012 * b * (s * s + t * t + s * t)


def table_of(sizes: numpy.ndarray, count: int = SHAPES) -> list[Shape]:
    """At most so many shapes that hold all batches, the cheapest first.

    All batches are one group at first. The group whose best split, by S or by T, saves most is split; and so on. A
    shape is the largest B, S and T of a group.

    Args:
        sizes: N x 3, the shapes of batches.
    """
    groups = [sizes]
    splits = [_best_split(sizes)]
    while len(groups) < count:
        best = max(range(len(groups)), key=lambda number: splits[number][0])
        if splits[best][0] <= 0:
            break
        parts = splits[best][1]
        groups[best : best + 1], splits[best : best + 1] = parts, map(_best_split, parts)
    shapes = numpy.unique([group.max(0) for group in groups], axis=0)
    return [(int(b), int(s), int(t)) for b, s, t in shapes[cost(shapes).argsort()]]


def _best_split(group: numpy.ndarray) -> tuple[float, list[numpy.ndarray]]:
    """The most that a split of a group saves, and its parts."""
    best, whole = (0.0, [group]), float(cost(group.max(0, keepdims=True))[0]) * len(group)
    for axis in (1, 2):
        ordered = group[group[:, axis].argsort(kind="stable")]
        (places,) = numpy.nonzero(numpy.diff(ordered[:, axis]))
        if not len(places):
            continue
        before = numpy.maximum.accumulate(ordered)[places]
        after = numpy.maximum.accumulate(ordered[::-1])[::-1][places + 1]
        saved = whole - cost(before) * (places + 1) - cost(after) * (len(group) - places - 1)
        at = int(saved.argmax())
        if saved[at] > best[0]:
            best = float(saved[at]), [ordered[: places[at] + 1], ordered[places[at] + 1 :]]
    return best


def sizes_of(data: FairseqDataset, batches: Sequence[Sequence[int]]) -> numpy.ndarray | None:
    """The shapes of an epoch's batches, N x 3; None unless the data are fairseq's pairs of sentences.

    Args:
        batches: the rows of each.
    """
    if type(data) is not LanguagePairDataset or data.tgt is None:
        return None
    source, target = numpy.asarray(data.src_sizes), numpy.asarray(data.tgt_sizes)
    return numpy.array([(len(rows), source[rows].max(), target[rows].max()) for rows in batches])


class Static:
    """The tensors that a graph reads: one batch of a shape, filled up with sentences of one token without a target."""

    def __init__(self, shape: Shape, words: Dictionary, device: torch.device):
        rows, source, target = shape
        self.pad, self.eos = words.pad(), words.eos()
        widths = {"src_tokens": source, "prev_output_tokens": target, "target": target}
        self.tokens = {
            name: torch.full((rows, width), self.pad, dtype=torch.int64, device=device)
            for name, width in widths.items()
        }
        self.lengths = torch.ones(rows, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Make all sentences fill up."""
        for name, tokens in self.tokens.items():
            tokens.fill_(self.pad)
            if name != "target":
                tokens[:, 0] = self.eos
        self.lengths.fill_(1)

    def fill(self, sample: Sample) -> None:
        """Copy a batch here. Padding may be on either side of a sentence, and on both."""
        self.clear()
        inputs = {**sample["net_input"], "target": sample["target"]}
        for name, tokens in self.tokens.items():
            rows, width = inputs[name].shape
            tokens[:rows, :width] = inputs[name]
        self.lengths[: len(inputs["src_lengths"])] = inputs["src_lengths"]

    def sample(self, ntokens: int) -> Sample:
        """The batch as a criterion takes it; a new dict, since R-Drop changes its own."""
        inputs = {"src_lengths": self.lengths, **{name: x for name, x in self.tokens.items() if name != "target"}}
        return {"id": None, "net_input": inputs, "target": self.tokens["target"], "ntokens": ntokens}


class Captured(NamedTuple):
    """The step of one shape."""

    static: Static
    graph: Graph
    names: list[str]  # of the tensors that the criterion logs
    values: Tensor  # these tensors, which each replay writes


class GraphedStep:
    """In the place of ``task.train_step``.

    Args:
        task, model, criterion: fairseq's.
        optimizer: ours, or its wrapper for half precision.
        table: gives the shapes of the epoch's batches; None where the data have none.
        graph: makes a new graph.
    """

    def __init__(
        self,
        task: FairseqTask,
        model: nn.Module,
        criterion: FairseqCriterion,
        optimizer: FairseqOptimizer,
        table: Callable[[], list[Shape] | None],
        graph: Callable[[], Graph],
    ):
        self.eager = type(task).train_step.__get__(task)
        self.words, self.model, self.criterion, self.optimizer = task.source_dictionary, model, criterion, optimizer
        self.adam: FairseqAdam = getattr(optimizer, "fp32_optimizer", optimizer)
        self.table, self.graph = table, graph
        self.shapes: list[Shape] | None = None  # until the first step
        self.captured: dict[Shape, Captured | None] = {}  # None: there was no memory for it
        self.scale = torch.ones((), device=self.adam.flat.weights.device)
        self.refused: str | None = None

    def __call__(
        self,
        sample: Sample,
        model: nn.Module,
        criterion: FairseqCriterion,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
        **others: Any,
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """As fairseq's: the loss, the sample size and the log, whose tensors are the device's."""
        captured = None if ignore_grad or others else self._captured_for(sample)
        if captured is not None:
            return self._replay(captured, sample)
        result = self.eager(sample, model, criterion, optimizer, update_num, ignore_grad, **others)
        if self.refused is None or self.adam.gathered:  # else the gradients wait in the parameters, as without graphs
            self.adam.begin()
            self.adam.add()
        return result

    def counts(self, target: Tensor, ntokens: int) -> dict[str, int]:
        """The numbers that a criterion logs beside tensors, of a batch with this target, B x T."""
        size = target.size(0) if self.criterion.sentence_avg else ntokens
        return {"ntokens": ntokens, "nsentences": target.size(0), "sample_size": size}

    def _replay(self, captured: Captured, sample: Sample) -> tuple[Tensor, int, dict[str, Any]]:
        captured.static.fill(sample)
        scaler = getattr(self.optimizer, "scaler", None)
        self.scale.fill_(1.0 if scaler is None else scaler.loss_scale)
        self.adam.begin()
        captured.graph.replay()
        values = captured.values.clone().unbind()
        counts = self.counts(sample["target"], sample["ntokens"])
        return values[0], counts["sample_size"], {**counts, **dict(zip(captured.names, values, strict=True))}

    def _captured_for(self, sample: Sample) -> Captured | None:
        """The captured step of the cheapest shape that holds a batch; None where the step has to be eager."""
        if self.shapes is None and self.refused is None:
            self.shapes = self.table()
            self.refused = self._unsuited()
            if self.refused:
                logger.warning("training steps are not captured: %s", self.refused)
        if self.refused or self.shapes is None or sample["net_input"].keys() != set(INPUTS):
            return None
        size = (*sample["net_input"]["src_tokens"].shape, sample["target"].size(1))
        shape = next((x for x in self.shapes if all(a <= b for a, b in zip(size, x, strict=True))), None)
        if shape is None:
            return None
        for each in (self.shapes[-1], shape):  # the largest first: the others find room in its memory
            if each not in self.captured and not self.refused:
                self.captured[each] = self._capture(each)
        return self.captured.get(shape) if not self.refused else None

    def _unsuited(self) -> str | None:
        """Why no step of this model can be captured."""
        modules, criterion = list(self.model.modules()), self.criterion
        args = getattr(self.model, "args", None) or getattr(self.model, "cfg", None)
        reasons = {
            "no shapes are known: they are read from an epoch's batches of a LanguagePairDataset": self.shapes is None,
            "fairseq's own models look at the batch's numbers": not isinstance(self.model, EvolvingModel),
            "LayerDrop draws its layers on the host": any(
                isinstance(module, LayerDropModuleList) and module.p > 0 for module in modules
            ),
            "activations are computed twice (--checkpoint-activations, --offload-activations)": getattr(
                args, "checkpoint_activations", False
            ),
            "--quant-noise-scalar counts its steps on the host": bool(getattr(args, "quant_noise_scalar", 0)),
            "a hook or an observer looks at the model": any(
                getattr(module, "observer", None) is not None or has_hooks(module) for module in modules
            ),
            f"the criterion {type(criterion).__name__} is not known": type(criterion) not in CRITERIA,
            "--report-accuracy looks at the batch's numbers": getattr(criterion, "report_accuracy", False),
            "the task has a training step of its own": self.eager.__func__ is not FairseqTask.train_step,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _capture(self, shape: Shape) -> Captured | None:
        """The captured step of a shape; None, and a line in the log, where that fails."""
        flat, graph = self.adam.flat, self.graph()
        static = Static(shape, self.words, flat.weights.device)
        devices = [flat.weights.device] if flat.weights.is_cuda else []
        untried = len(refusals.untried)
        try:
            with torch.random.fork_rng(devices), _recording():
                with graph.aside(), NoReads():
                    log, _ = self._step(static)
                numbers = {name: value for name, value in log.items() if not isinstance(value, Tensor)}
                if numbers != self.counts(static.tokens["target"], 1):
                    raise HostRead(f"the criterion logs {numbers}, which are not the batch's counts")
                with graph.capture():
                    log, values = self._step(static)
            if len(refusals.untried) > untried:
                raise HostRead(f"a kernel had no trial before the capture: {refusals.untried[-1]}")
            return Captured(static, graph, [name for name, x in log.items() if isinstance(x, Tensor)], values)
        except torch.OutOfMemoryError as error:
            logger.warning("no memory to capture a step of %d x %d x %d tokens: %s", *shape, refusals.summary(error))
            return None
        except RuntimeError as error:
            self.refused = refusals.summary(error)
            logger.warning("training steps are not captured: %s", self.refused)
            return None
        finally:  # the sum of gradients is as before: sentences without a target add zeros
            for parameter in self.adam.sources:
                parameter.grad = None

    def _step(self, static: Static) -> tuple[dict[str, Any], Tensor]:
        """The work of a graph; it adds to the sum of gradients. Gives the criterion's log, and its tensors stacked."""
        loss, _, log = self.criterion(self.model, static.sample(ntokens=1))
        values = torch.stack([x.detach().float().reshape(()) for x in log.values() if isinstance(x, Tensor)])
        (self.scale * loss).backward()
        self.adam.add()
        return log, values


@contextmanager
def _recording() -> Iterator[None]:
    """While this holds, neither the model nor R-Drop, which logs by ``utils.item``, reads numbers."""
    item, utils.item = utils.item, lambda x: x
    try:
        with capturing():
            yield
    finally:
        utils.item = item
