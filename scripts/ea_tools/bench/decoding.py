"""Time decoding, ours and fairseq's Transformer in turns on the same batches; options.decoding says how."""

from __future__ import annotations

import argparse
import atexit
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.models import BaseFairseqModel as FairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig

from ea_tools.bench import common, exported, options
from ea_tools.common import UserError, reporting, write_json
from ea_tools.maps.sides import BOTH, DECODER, NAMES, sides_of
from ea_tools.training.products import require_bf16_units


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: time, print, and keep everything in --output."""
    args = options.decoding(arguments)
    results = []
    with reporting("benchmark_decoding"):
        device = common.prepare(args)
        if device == "cpu" and "bf16" in args.precision:
            require_bf16_units()
        if args.exported:
            exported.require(args, device)
        for size in args.size:
            for precision in args.precision:
                for beam in args.beam:
                    for batch in args.batch:
                        results.append(measure(args, device, size, precision, beam, batch))
                        write_json(args.output, common.record("decoding", args, device, results))
    print(f"written: {args.output}")


def measure(args: argparse.Namespace, device: str, size: str, precision: str, beam: int, batch: str) -> dict[str, Any]:
    """Speed of one pair of models."""
    architectures = options.PAIRS[size]
    stock = architectures["stock"]
    if "decoder" not in (sides := common.sides_of_model(stock)):
        raise UserError(f"--size {size}: such models have {NAMES[sides]}, and decode nothing")
    # A model brings along the differences between the two.
    config = common.configuration(stock, *common.task_flags(stock), data=args.data or "data", device=device)
    config.generation.beam = beam
    task = common.make_task(args, config)
    models = {name: random_model(args, task, words) for name, words in architectures.items()}
    limits = {"max_tokens": args.max_tokens} if batch == "full" else {"max_sentences": int(batch)}
    batches = common.pick(common.corpus(args, task, args.subset), args.batches, args.seed, **limits)
    decoders = {
        name: decoder(task, ready(model, config, precision, device), config, device) for name, model in models.items()
    }
    label = f"{size} {precision}, beam {beam}, batch {batch}"
    if args.exported:
        folders = _exports(size, models, task)
        architectures = {**architectures, **{name: exported.NAMES[name] for name in folders}}
        decoders |= exported.candidates(folders, torch.get_num_threads(), beam, task)
    times = common.interleave(decoders, batches, args.repetitions, device, label)
    result = {
        "size": size,
        "architectures": architectures,
        "precision": precision,
        "beam": beam,
        "batch": batch,
        "batches": [common.describe(picked) for picked in batches],
        **common.speeds(times),
        "times": times,
    }
    common.report_speeds(label, result, device)
    if args.exported:
        by_cpu = common.ratios(times, "cpu_seconds")
        result |= {"ratios": common.ratios(times), "cpu_ratios": by_cpu, "starts": exported.starts(folders)}
        exported.report(result)
    return result


#: the folders of exported models, which a process writes once for each pair of models
_EXPORTS: dict[str, dict[str, Path]] = {}


def _exports(size: str, models: Mapping[str, FairseqModel], task: FairseqTask) -> dict[str, Path]:
    if size not in _EXPORTS:
        folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _EXPORTS[size] = exported.write(models, task, folder)
    return _EXPORTS[size]


def random_model(args: argparse.Namespace, task: FairseqTask, words: str) -> FairseqModel:
    """A model as if it came from a checkpoint: loading may change which path fairseq's encoder takes."""
    shared = ["--share-all-embeddings"] if common.sides_of_model(words) == BOTH else []
    config = common.configuration(words, *common.task_flags(words), *shared, data=args.data or "data")
    torch.manual_seed(args.seed)
    model = task.build_model(config.model)
    model.load_state_dict(model.state_dict())
    return model


def ready(model: FairseqModel, config: DictConfig, precision: str, device: str) -> FairseqModel:
    """As fairseq-generate prepares a model."""
    model.to(device=device, dtype=common.DTYPES[common.type_of_numbers(precision, device)])
    model.prepare_for_inference_(config)
    return model


def decoder(task: FairseqTask, model: FairseqModel, config: DictConfig, device: str) -> common.Candidate:
    """A function that decodes a batch, in as many steps as its targets have, and gives the number of tokens."""
    generator = task.build_generator([model], config.generation)

    def decode(batch: common.Batch) -> int:
        steps = round(batch["ntokens"] / batch["nsentences"]) - 1  # end of sentence follows
        generator.min_len, generator.max_len_a, generator.max_len_b = steps, 0, steps
        sample = utils.move_to_cuda(batch) if device == "cuda" else batch
        if sides_of(type(model)) == DECODER:  # needs no source
            sample = {"net_input": {"src_tokens": sample["net_input"]["src_tokens"][:, :1]}}
        return sum(len(hypotheses[0]["tokens"]) for hypotheses in task.inference_step(generator, [model], sample))

    return decode
