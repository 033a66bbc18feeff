"""fairseq's trainer with one optimizer call for all parameters."""

import logging
from itertools import chain

from fairseq.trainer import Trainer

from . import optim

logger = logging.getLogger(__name__)


class FlatTrainer(Trainer):
    """fairseq's trainer, with ``optim.FairseqAdam`` where it does what fairseq's does."""

    #: the values of --optimizer for which ours is taken
    OPTIMIZERS: tuple[str, ...] = (optim.NAME,)

    def _build_optimizer(self) -> None:
        name = self.cfg.optimizer._name
        if name not in self.OPTIMIZERS:
            return super()._build_optimizer()
        params = chain(self.model.parameters(), self.criterion.parameters())
        reason = optim.unsuited(self.cfg, [x for x in params if x.requires_grad], list(self.model.modules()))
        if reason:
            logger.info("the optimizer is fairseq's own Adam: %s", reason)
            return super()._build_optimizer()
        logger.info("the optimizer updates all parameters in one call")
        with optim.flat_classes(name):
            return super()._build_optimizer()
