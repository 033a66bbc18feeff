"""Time decoding, ours and fairseq's Transformer in turns on the same batches; options.decoding says how."""

from __future__ import annotations

import argparse
import atexit
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.models import BaseFairseqModel as FairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig

from ea_fairseq import graphs
from ea_tools.bench import common, exported, options

#: a further candidate on a GPU: our model, each step launched by the host
NO_GRAPHS = "ours, no graphs"
FULL = 12_000  # tokens of a full batch


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: time, print, and keep everything in --output."""
    args = options.decoding(arguments)

    def cases(device: str) -> Iterator[tuple[str, str, int, str]]:
        if args.exported:
            exported.require(args, device)
        return itertools.product(args.size, args.precision, args.beam, args.batch)

    common.run("decoding", args, cases, measure)


def measure(args: argparse.Namespace, device: str, size: str, precision: str, beam: int, batch: str) -> dict[str, Any]:
    """Speed of one pair of models."""
    architectures = options.PAIRS[size]
    config, task = configured(size, beam, device)
    models = {name: random_model(task, words) for name, words in architectures.items()}
    batches = choose(args, task, batch)
    decoders = {
        name: decoder(task, ready(model, config, precision, device), config, device) for name, model in models.items()
    }
    if graphs.for_device(torch.device(device)) is not None:
        eager = ready(random_model(task, architectures["ours"]), config, precision, device)
        eager.decoder.graphs = False
        decoders[NO_GRAPHS] = decoder(task, eager, config, device)
    label = f"{size} {precision}, beam {beam}, batch {batch}"
    if args.exported:
        folders = _exports(size, models, task)
        architectures = {**architectures, **{name: exported.NAMES[name] for name in folders}}
        decoders |= exported.candidates(folders, torch.get_num_threads(), beam, task)
    times = common.interleave(decoders, batches, args.repetitions, device, label)
    return {
        "label": label,
        "size": size,
        "architectures": architectures,
        "precision": precision,
        "beam": beam,
        "batch": batch,
        "batches": [common.describe(picked) for picked in batches],
        **common.speeds(times),
        "times": times,
    }


def configured(size: str, beam: int, device: str) -> tuple[DictConfig, FairseqTask]:
    """fairseq's configuration and task, which do for both models of a pair."""
    config = common.configuration(options.PAIRS[size]["stock"], device=device)
    config.generation.beam = beam
    return config, common.make_task(config)


def choose(args: argparse.Namespace, task: FairseqTask, batch: str) -> list[common.Batch]:
    """The batches to decode."""
    limits = {"max_tokens": FULL} if batch == "full" else {"max_sentences": int(batch)}
    data = common.random_sentences(task)
    return common.pick(data, common.batches_of(data, **limits), args.batches)


#: the folders of exported models, which a process writes once for each pair of models
_EXPORTS: dict[str, dict[str, Path]] = {}


def _exports(size: str, models: Mapping[str, FairseqModel], task: FairseqTask) -> dict[str, Path]:
    if size not in _EXPORTS:
        folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _EXPORTS[size] = exported.write(models, task, folder)
    return _EXPORTS[size]


def random_model(task: FairseqTask, words: str) -> FairseqModel:
    """A model as if it came from a checkpoint: loading may change which path fairseq's encoder takes."""
    torch.manual_seed(common.SEED)
    model = task.build_model(common.configuration(words).model)
    model.load_state_dict(model.state_dict())
    return model


def ready(model: FairseqModel, config: DictConfig, precision: str, device: str) -> FairseqModel:
    """As fairseq-generate prepares a model."""
    model.to(device=device, dtype=common.DTYPES[common.type_of_numbers(precision, device)])
    model.prepare_for_inference_(config)
    return model


def decoder(task: FairseqTask, model: FairseqModel, config: DictConfig, device: str) -> common.Candidate:
    """A function that decodes a batch and gives the number of tokens."""
    search = searcher(task, model, config, device)
    return lambda batch: sum(len(hypotheses[0]["tokens"]) for hypotheses in search(batch))


def searcher(
    task: FairseqTask, model: FairseqModel, config: DictConfig, device: str
) -> Callable[[common.Batch], list[list[dict[str, Any]]]]:
    """A function that decodes a batch, in as many steps as its targets have, and gives fairseq's hypotheses."""
    generator = task.build_generator([model], config.generation)

    def search(batch: common.Batch) -> list[list[dict[str, Any]]]:
        steps = round(batch["ntokens"] / batch["nsentences"]) - 1  # end of sentence follows
        generator.min_len, generator.max_len_a, generator.max_len_b = steps, 0, steps
        sample = utils.move_to_cuda(batch) if device == "cuda" else batch
        return task.inference_step(generator, [model], sample)

    return search
