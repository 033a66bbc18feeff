"""EA-DC-Transformer with the interface of scikit-learn and aeon: fit, predict, predict_proba, score.

EvolvingDCTransformerClassifier().fit(X, y).predict(X)  # X: n x C x T, or a list of C x T arrays
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from aeon.classification.base import BaseClassifier
from aeon.regression.base import BaseRegressor
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from examples.common import fit
from examples.time_series.model import Network


@dataclass(eq=False, repr=False)
class _Trained:
    """The common part of both estimators: parameters, padding, scaling and training."""

    kind: str = "attention"  # or a baseline: "ResNet", "GRU", "LSTM"
    layers: int = 4  # two to a block; dilations 1, 2, 4, ...
    d: int = 64  # model size
    p: float = 0.25  # attention's share of d
    alpha: float = 0.5  # share of the previous map
    beta: float = 0.5  # share of the convolution of maps
    kernel_size: int = 3  # of that convolution
    dropout: float = 0.1
    epochs: int = 50
    batch: int = 64
    rate: float = 1e-3  # of RAdam; it falls to zero along a cosine
    pretrain_epochs: int = 0  # of restoring masked values, before the task (equation 8)
    random_state: int | None = None  # of weights, batches and dropout

    _tags: ClassVar[dict[str, Any]] = {
        "capability:multivariate": True,
        "capability:unequal_length": True,
        "X_inner_type": ["np-list", "numpy3D"],
    }

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, Any]:
        return {"layers": 2, "d": 16, "epochs": 3, "random_state": 0}

    def _train(self, series: Sequence[np.ndarray], targets: Tensor, outputs: int, loss: Callable) -> None:
        values = np.concatenate(list(series), axis=1)  # C x all times
        self.mean_, deviation = values.mean(1, keepdims=True), values.std(1, keepdims=True)
        self.deviation_ = np.where(deviation < 1e-8, 1.0, deviation)  # a channel may be constant
        self.length_ = max(one.shape[1] for one in series)
        x, padded = self._tensors(series)
        names = ("kind", "layers", "d", "p", "alpha", "beta", "kernel_size", "dropout")
        options = {name: getattr(self, name) for name in names}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(np.random.randint(2**31) if self.random_state is None else self.random_state)
            network = self.network_ = Network(x.size(2), self.length_, outputs, **options)
            for epochs, of_rows in (
                (self.pretrain_epochs, lambda rows: network.restoration_loss(x[rows], padded[rows])),
                (self.epochs, lambda rows: loss(network(x[rows], padded[rows]), targets[rows])),
            ):
                optimizer = torch.optim.RAdam(network.parameters(), lr=self.rate, betas=(0.9, 0.99))
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs))
                fit(network, of_rows, len(x), self.batch, epochs, optimizer, schedule)

    def _tensors(self, series: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Scaled series, n x T x C, and their padding, n x T. Series longer than the longest of `fit` are cut."""
        scaled = [((one - self.mean_) / self.deviation_).T[: self.length_] for one in series]
        x = pad_sequence([torch.from_numpy(one).float() for one in scaled], batch_first=True)
        lengths = torch.tensor([[len(one)] for one in scaled])
        return F.pad(x, (0, 0, 0, self.length_ - x.size(1))), torch.arange(self.length_) >= lengths

    @torch.no_grad()
    def _outputs(
        self, series: Sequence[np.ndarray], function: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Tensor:
        """The outputs of the network, or of a function of it, for the series."""
        parts = (self._tensors(series[start : start + self.batch]) for start in range(0, len(series), self.batch))
        return torch.cat([(function or self.network_)(*part) for part in parts])

    def represent(self, series: Sequence[np.ndarray]) -> np.ndarray:
        """The flattened representation Z of each series, n x (T d)."""
        return self._outputs(series, self.network_.represent).flatten(1).numpy()


class EvolvingDCTransformerClassifier(_Trained, BaseClassifier):
    """Classification; see ``_Trained`` for the parameters."""

    def _fit(self, X: Sequence[np.ndarray], y: np.ndarray) -> "EvolvingDCTransformerClassifier":
        self._train(X, torch.from_numpy(np.searchsorted(self.classes_, y)), len(self.classes_), F.cross_entropy)
        return self

    def _predict(self, X: Sequence[np.ndarray]) -> np.ndarray:
        return self.classes_[self._predict_proba(X).argmax(1)]

    def _predict_proba(self, X: Sequence[np.ndarray]) -> np.ndarray:
        return self._outputs(X).double().softmax(1).numpy()


class EvolvingDCTransformerRegressor(_Trained, BaseRegressor):
    """Regression; see ``_Trained`` for the parameters."""

    def _fit(self, X: Sequence[np.ndarray], y: np.ndarray) -> "EvolvingDCTransformerRegressor":
        self.target_mean_, self.target_deviation_ = float(np.mean(y)), float(np.std(y)) + 1e-8
        targets = torch.from_numpy((np.asarray(y) - self.target_mean_) / self.target_deviation_).float()
        self._train(X, targets, 1, lambda outputs, wanted: F.mse_loss(outputs[:, 0], wanted))
        return self

    def _predict(self, X: Sequence[np.ndarray]) -> np.ndarray:
        return self._outputs(X)[:, 0].double().numpy() * self.target_deviation_ + self.target_mean_
