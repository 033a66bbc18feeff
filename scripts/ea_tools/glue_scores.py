"""What a classifier predicts on a split, and GLUE's metrics of it."""

from pathlib import Path


def predict(checkpoint: Path, data: Path, split: str) -> tuple[list[float], list[float]]:
    """What a model predicts for each row of a split, class or number, and what is right, in the same order."""
    import ea_fairseq  # noqa: F401  (registers the models; first, for fairseq is less talkative then)

    # isort: split
    import torch
    from fairseq import checkpoint_utils, utils

    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": str(data)}
    )
    model = model.eval().to("cuda" if torch.cuda.is_available() and not cfg.common.cpu else "cpu")
    task.load_dataset(split)
    batches = task.get_batch_iterator(task.dataset(split), max_sentences=64).next_epoch_itr(shuffle=False)
    predicted, expected = [], []
    for sample in batches:
        sample = utils.move_to_cuda(sample) if next(model.parameters()).is_cuda else sample
        with torch.no_grad():
            logits, _ = model(
                **sample["net_input"],
                features_only=True,
                classification_head_name=cfg.task.classification_head_name,
            )
        answers = logits.view(-1) if cfg.task.regression_target else logits.argmax(dim=1)
        predicted += answers.tolist()
        expected += sample["target"].view(-1).tolist()
    return predicted, expected


def _matthews(expected: list, predicted: list) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(expected, predicted))


def _accuracy(expected: list, predicted: list) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(expected, predicted))


def _f1(expected: list, predicted: list) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(expected, predicted))


def _correlation(name: str, expected: list, predicted: list) -> float:
    """0 where one side is constant, which has no correlation."""
    from scipy import stats

    if len(set(expected)) == 1 or len(set(predicted)) == 1:
        return 0.0
    return float(getattr(stats, name)(expected, predicted).statistic)


#: (expected, predicted) -> the metric, at most 1
METRICS = {
    "matthews": _matthews,
    "accuracy": _accuracy,
    "f1": _f1,
    "pearson": lambda expected, predicted: _correlation("pearsonr", expected, predicted),
    "spearman": lambda expected, predicted: _correlation("spearmanr", expected, predicted),
}
