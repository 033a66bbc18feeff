"""fairseq's Adam in one call for all parameters: ``--optimizer flat_adam``.

fairseq's Adam and its wrapper for half precision go through the parameters one by one, eleven launches for each. Here
weights, gradients and moments are one tensor each. The rule is fairseq's; results differ by rounding only. Classes and
state dicts are fairseq's, too, so a checkpoint of ``--optimizer adam`` resumes under ``flat_adam``, and the reverse.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fairseq import optim
from fairseq.modules import LayerDropModuleList
from fairseq.optim import adam, fp16_optimizer
from omegaconf import DictConfig
from torch import Tensor, nn

from .private import fused_adamw

#: the value of --optimizer
NAME = "flat_adam"
#: Each parameter begins at a multiple of so many numbers: products are slower on numbers that lie less evenly.
ALIGNMENT = 64
#: attributes of a parameter that does not learn as the others do
OWN = ("param_group", "optim_overrides", "expert", "base_expert")

# Without ``FlatTrainer`` the name means fairseq's own.
optim.register_optimizer(NAME, dataclass=adam.FairseqAdamConfig)(adam.FairseqAdam)


class Layout:
    """The places of many tensors in one."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.shapes = [x.shape for x in tensors]
        self.gaps = [-x.numel() % ALIGNMENT for x in tensors]
        self.sizes = [size for x, gap in zip(tensors, self.gaps, strict=True) for size in (x.numel(), gap)]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors that lie in one."""
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes)[::2], self.shapes, strict=True)]

    def join(self, tensors: Sequence[Tensor | None], like: Tensor, out: Tensor | None = None) -> Tensor:
        """One tensor of all; None counts as zeros.

        Args:
            like: a tensor of the type and device of all.
            out: where the result belongs; by default in new memory.
        """
        zeros, parts = like.new_zeros(ALIGNMENT), []
        for x, gap, shape in zip(tensors, self.gaps, self.shapes, strict=True):
            parts += [like.new_zeros(shape.numel()) if x is None else x.reshape(-1), zeros[:gap]]
        return torch.cat(parts, out=out)


class Adam(torch.optim.Optimizer):
    """Adam for all parameters at once, by fairseq's rule.

    fairseq divides by ``sqrt(v) + eps``. PyTorch's fused AdamW divides by ``sqrt(v / (1 - beta2^t)) + eps``, which is
    the same step with ``eps / sqrt(1 - beta2^t)`` in the place of eps.

    Args:
        params: float32, on one device; they become views of one tensor.
        one_entry: whether a state dict has one entry for all, as fairseq's has with --fp16.
        defaults: lr, betas, eps and weight_decay.
    """

    def __init__(self, params: list[nn.Parameter], one_entry: bool, **defaults: Any):
        super().__init__(params, {**defaults, "amsgrad": False})
        self.one_entry, self.count = one_entry, 0
        self.layout = Layout(params)
        with torch.no_grad():
            self.weights = self.layout.join(params, params[0])
        self.gradients, self.exp_avg, self.exp_avg_sq = (torch.zeros_like(self.weights) for _ in range(3))
        self.factor: float | Tensor = 1.0  # of the gradients; the kernel multiplies them
        numbers = torch.zeros(3, device=self.weights.device)
        self._step, self._scale, self.overflow = numbers.unbind()
        for parameter, view in zip(params, self.layout.views(self.weights), strict=True):
            parameter.data = view

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # fairseq gives no closure
        """One update by ``gradients`` times ``factor``; none where ``overflow`` is 1."""
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        self.count += 1
        self._step.fill_(self.count)
        # fill_ with a tensor of the device, or with a number: neither waits for a GPU
        self._scale.fill_(1.0 / self.factor)
        fused_adamw(
            [self.weights],
            [self.gradients],
            [self.exp_avg],
            [self.exp_avg_sq],
            max_exp_avg_sqs=[],
            state_steps=[self._step],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"] / math.sqrt(1 - beta2**self.count),
            amsgrad=False,
            maximize=False,
            grad_scale=self._scale,
            found_inf=self.overflow,
        )

    def state_dict(self) -> dict[str, Any]:
        """As fairseq's: both moments and the number of steps, by parameter."""
        each = [self.layout.views(moment) for moment in (self.exp_avg, self.exp_avg_sq)]
        if self.one_entry:
            each = [[torch.cat([x.reshape(-1) for x in moments])] for moments in each]
        state = {
            number: {"step": self.count, "exp_avg": m, "exp_avg_sq": v}
            for number, (m, v) in enumerate(zip(*each, strict=True))
        }
        (group,) = self.param_groups
        group = {**group, "params": list(state)}
        return {"state": state if self.count else {}, "param_groups": [group]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class or of fairseq's.

        Raises:
            ValueError: there are more or fewer parameters, or they were updated differently often.
        """
        (saved,), state = state_dict["param_groups"], state_dict["state"]
        there, here = len(saved["params"]), len(self.layout.shapes)
        if there not in (1, here):
            raise ValueError(f"the checkpoint's optimizer has {there} parameters, and the model {here}")
        counts = {int(entry["step"]) for entry in state.values()} or {0}
        if len(counts) > 1:
            raise ValueError(
                f"--optimizer {NAME}: this checkpoint's parameters had {min(counts)} to {max(counts)} updates each, as "
                "with LayerDrop; continue with --optimizer adam"
            )
        (self.count,) = counts
        self.param_groups[0].update({name: value for name, value in saved.items() if name != "params"})
        for name in ("exp_avg", "exp_avg_sq"):
            views = self.layout.views(getattr(self, name).zero_())
            moments = {number: entry[name] for number, entry in state.items()}
            if state and len(saved["params"]) == 1:
                moments = dict(enumerate(moments[0].split([view.numel() for view in views])))
            for number, moment in moments.items():  # fairseq has none of a parameter without a gradient
                views[number].copy_(moment.view_as(views[number]))


class FairseqAdam(adam.FairseqAdam):
    """fairseq's class by its name, which checkpoints hold.

    An update's gradients are gathered when they are first asked for. Or ``begin`` and ``add`` sum them batch by batch.

    Args:
        cfg: fairseq's options of Adam.
        params: float32 parameters.
        sources: the parameters that have the gradients; by default the same.
        one_entry: see ``Adam``.
    """

    def __init__(
        self, cfg: DictConfig, params: list[nn.Parameter], sources: Any = None, one_entry: bool = False
    ) -> None:
        optim.FairseqOptimizer.__init__(self, cfg)
        self._optimizer = self.flat = Adam(params, one_entry, **self.optimizer_config)
        self.sources: list[nn.Parameter] = params if sources is None else sources
        self.gathered = False
        self._still: list[Tensor] = []  # weights without a gradient, which fairseq leaves alone in float32

    @torch.no_grad()
    def gather(self) -> None:
        """Have the gradients of this update in one tensor."""
        if not self.gathered:
            whole = self.flat.gradients
            if self.sources[0].dtype == whole.dtype:
                self._joined(out=whole)
            else:
                whole.copy_(self._joined())
            self.gathered = True

    def begin(self) -> None:
        """Have the sum of an update's gradients begin with zero, unless it has begun."""
        if not self.gathered:
            self.flat.gradients.zero_()
            self.gathered = True

    @torch.no_grad()
    def add(self) -> None:
        """Add a batch's gradients to a sum that has begun, always by the same operations: a graph may repeat them."""
        self.flat.gradients.add_(self._joined())

    def _joined(self, out: Tensor | None = None) -> Tensor:
        """The parameters' gradients in one tensor, and no longer in the parameters."""
        gradients, views = [x.grad for x in self.sources], self.flat.layout.views(self.flat.weights)
        if self.sources[0].dtype == torch.float32:
            self._still = [view for view, gradient in zip(views, gradients, strict=True) if gradient is None]
        for source in self.sources:
            source.grad = None
        return self.flat.layout.join(gradients, self.sources[0], out)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for source in self.sources:
            source.grad = None
        self.gathered, self.flat.factor = False, 1.0

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply the gradients by c."""
        self.flat.factor = self.flat.factor * (c.to(self.flat.weights.device) if isinstance(c, Tensor) else c)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        """As fairseq's: the norm of all gradients, which are made shorter where it is above max_norm > 0."""
        self.gather()
        norm = torch.linalg.vector_norm(self.flat.gradients) * self.flat.factor
        # 1 where infinite or not a number: x - x is a number for all other x
        self.flat.overflow.copy_((norm - norm).ne(0))
        if max_norm > 0:
            self.flat.factor = self.flat.factor * (max_norm / (norm + 1e-6)).clamp_(max=1)
        return norm

    @torch.no_grad()
    def step(self, closure: None = None, scale: float = 1.0, groups: None = None) -> None:
        """One update."""
        self.gather()
        still = [view.clone() for view in self._still]
        self.flat.step()
        for view, weights in zip(self._still, still, strict=True):
            view.copy_(weights)


class FP16Optimizer(fp16_optimizer.FP16Optimizer):
    """fairseq's class by its name: weights in half precision are one tensor, too."""

    @classmethod
    def build_optimizer(cls, cfg: DictConfig, params: list[nn.Parameter], **kwargs: Any) -> "FP16Optimizer":
        """The optimizer of a model in half precision, bfloat16 or float16."""
        masters = [nn.Parameter(parameter.detach().float()) for parameter in params]
        one_entry = not (cfg.common.bf16 or cfg.common.fp16_no_flatten_grads)
        return cls(cfg, params, FairseqAdam(cfg.optimizer, masters, params, one_entry), masters, **kwargs)

    def __init__(
        self, cfg: DictConfig, params: list[nn.Parameter], fp32_optimizer: FairseqAdam, *args: Any, **kwargs: Any
    ):
        super().__init__(cfg, params, fp32_optimizer, *args, **kwargs)
        layout = fp32_optimizer.flat.layout
        with torch.no_grad():
            self._half = layout.join(params, params[0])
        for parameter, view in zip(params, layout.views(self._half), strict=True):
            parameter.data = view

    def _sync_fp16_grads_to_fp32(self) -> None:
        self.fp32_optimizer.gather()
        self._needs_sync = False

    def _sync_fp32_params_to_fp16(self) -> None:
        self._half.copy_(self.fp32_optimizer.flat.weights)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.fp32_optimizer.zero_grad()
        self._needs_sync = False
        self._multiply_factor = 1.0 if self.scaler is None else 1.0 / float(self.scaler.loss_scale)


def unsuited(cfg: DictConfig, params: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> str | None:
    """Why fairseq's own Adam has to be taken, which alone does what these options ask for; None where ours may be.

    Args:
        cfg: fairseq's configuration.
        params: those to be trained.
        modules: all modules of the model.
    """
    common, half = cfg.common, cfg.common.fp16 or cfg.common.bf16
    devices, dtypes = {x.device.type for x in params}, {x.dtype for x in params}
    expected = {torch.bfloat16 if common.bf16 else torch.float16 if half else torch.float32}
    reasons = {
        "--use-old-adam asks for it": cfg.optimizer.use_old_adam,
        "--fp16-adam-stats keeps moments in half precision": cfg.optimizer.fp16_adam_stats,
        "TPUs have other kernels": common.tpu,
        "--amp scales gradients itself": common.amp,
        "--memory-efficient-fp16 and -bf16 keep no weights in float32": (
            common.memory_efficient_fp16 or common.memory_efficient_bf16
        ),
        "--zero-sharding shares the optimizer out among processes": cfg.distributed_training.zero_sharding != "none",
        "--ddp-backend fully_sharded shares parameters out among processes": (
            cfg.distributed_training.ddp_backend == "fully_sharded"
        ),
        "--ddp-backend slowmo averages weights itself": cfg.distributed_training.ddp_backend == "slowmo",
        "--use-bmuf averages weights itself": cfg.optimization.use_bmuf,
        "LayerDrop updates some parameters less often": any(
            isinstance(module, LayerDropModuleList) and module.p > 0 for module in modules
        ),
        "some parameters have options of their own": any(hasattr(x, name) for x in params for name in OWN),
        "parameters are sparse": any(x.layout is not torch.strided for x in params),
        "parameters lie on several devices": len({x.device for x in params}) > 1,
        "its kernel is for CPUs and NVIDIA's or AMD's GPUs": not devices <= {"cpu", "cuda"},
        "parameters are of another type than the options say": dtypes != expected,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@contextmanager
def flat_classes(name: str) -> Iterator[None]:
    """While this holds, fairseq's trainer builds our optimizer for ``--optimizer name``."""
    registry = optim.OPTIMIZER_REGISTRY
    fairseqs = registry[name], optim.FP16Optimizer
    registry[name], optim.FP16Optimizer = FairseqAdam, FP16Optimizer
    try:
        yield
    finally:
        registry[name], optim.FP16Optimizer = fairseqs
