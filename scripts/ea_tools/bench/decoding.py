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
from fairseq.checkpoint_utils import load_model_ensemble
from fairseq.models import BaseFairseqModel as FairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig
from tqdm import tqdm

from ea_tools.bench import exported, options
from ea_tools.bench.common import (
    DTYPES,
    Batch,
    Candidate,
    calls,
    configuration,
    corpus,
    describe,
    interleave,
    make_task,
    pick,
    prepare,
    record,
    report_speeds,
    sides_of_model,
    speeds,
    task_flags,
    type_of_numbers,
)
from ea_tools.checkpoints import check_dictionaries, choose, load, section, settings
from ea_tools.common import UserError, reporting, write_json
from ea_tools.maps.sides import BOTH, DECODER, NAMES, sides_of
from ea_tools.text import read_prep
from ea_tools.training.products import require_bf16_units


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: time, print, and keep everything in --output."""
    args = options.decoding(arguments)
    results = []
    with reporting("benchmark_decoding"):
        device = prepare(args)
        if device == "cpu" and "bf16" in args.precision:
            require_bf16_units()
        if args.exported:
            exported.require(args, device)
        for subject in [args.run_pair] if args.run_pair else args.size:
            for precision in args.precision:
                for beam in args.beam:
                    for batch in args.batch:
                        results.append(measure(args, device, subject, precision, beam, batch))
                        write_json(args.output, record("decoding", args, device, results))
    print(f"written: {args.output}")


def measure(
    args: argparse.Namespace, device: str, subject: str | Sequence[Path], precision: str, beam: int, batch: str
) -> dict[str, Any]:
    """Speed of one pair of models; `subject`: a key of PAIRS, or two folders with trained runs."""
    if not isinstance(subject, str):
        for run in subject:
            _must_translate(run)
    stock = options.PAIRS[subject]["stock"] if isinstance(subject, str) else "transformer"
    if "decoder" not in (sides := sides_of_model(stock)):
        raise UserError(f"--size {subject}: such models have {NAMES[sides]}, and decode nothing")
    # A model brings along the differences between the two.
    config = configuration(stock, *task_flags(stock), data=args.data or "data", device=device)
    config.generation.beam = beam
    task = make_task(args, config)
    if isinstance(subject, str):
        archs, runs, label = options.PAIRS[subject], None, subject
        models = {name: random_model(args, task, words) for name, words in archs.items()}
    else:
        runs, label = dict(zip(("ours", "stock"), subject, strict=True)), "trained"
        archs, models = trained(args, task, runs)
    limits = {"max_tokens": args.max_tokens} if batch == "full" else {"max_sentences": int(batch)}
    batches = pick(corpus(args, task, args.subset), args.batches, args.seed, **limits)
    decoders = {
        name: decoder(task, ready(model, config, precision, device), config, device, fixed=runs is None)
        for name, model in models.items()
    }
    label += f" {precision}, beam {beam}, batch {batch}"
    if args.exported:
        folders = _exports(args, subject, models, task)
        decoders |= exported.candidates(folders, torch.get_num_threads(), beam, runs is None, task)
    with tqdm(
        total=calls(len(decoders), len(batches), args.repetitions), desc=label, unit=" batches", mininterval=1
    ) as progress:
        times = interleave(decoders, batches, args.repetitions, device, progress)
    result = {
        "size": subject if runs is None else None,
        "runs": runs and {name: str(path) for name, path in runs.items()},
        "architectures": {**archs, **({name: exported.NAMES[name] for name in folders} if args.exported else {})},
        "precision": precision,
        "beam": beam,
        "batch": batch,
        "batches": [describe(picked) for picked in batches],
        **speeds(times),
        "times": times,
    }
    report_speeds(label, result, device)
    if args.exported:
        by_cpu = exported.ratios(times, "cpu_seconds")
        result |= {"ratios": exported.ratios(times), "cpu_ratios": by_cpu, "starts": exported.starts(folders)}
        exported.report(result)
    return result


#: the folders of exported models, which a process writes once for each pair of models
_EXPORTS: dict[str, dict[str, Path]] = {}


def _exports(
    args: argparse.Namespace, subject: str | Sequence[Path], models: Mapping[str, FairseqModel], task: FairseqTask
) -> dict[str, Path]:
    if str(subject) not in _EXPORTS:
        folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _EXPORTS[str(subject)] = exported.write(models, task, folder)
    return _EXPORTS[str(subject)]


def random_model(args: argparse.Namespace, task: FairseqTask, words: str) -> FairseqModel:
    """A model as if it came from a checkpoint: loading may change which path fairseq's encoder takes."""
    shared = ["--share-all-embeddings"] if sides_of_model(words) == BOTH else []
    config = configuration(words, *task_flags(words), *shared, data=args.data or "data")
    torch.manual_seed(args.seed)
    model = task.build_model(config.model)
    model.load_state_dict(model.state_dict())
    return model


def trained(
    args: argparse.Namespace, task: FairseqTask, runs: Mapping[str, Path]
) -> tuple[dict[str, str], dict[str, FairseqModel]]:
    """{name: architecture}, {name: model} of two trained runs, each the checkpoint that scripts/translate.sh takes."""
    archs, models = {}, {}
    for name, run in runs.items():
        path = choose(run)
        state = load(path)
        check_dictionaries(args.data, read_prep(args.data), path, state)
        archs[name] = settings(state)["arch"]
        (models[name],), _ = load_model_ensemble([str(path)], task=task)
    return archs, models


def _must_translate(run: Path) -> None:
    """Refuse a run that was trained for something else."""
    task_name = section(load(choose(run)), "task").get("_name", "translation")
    if task_name != "translation":
        raise UserError(f"--run-pair {run}: was trained for {task_name}; runs for translation are wanted")


def ready(model: FairseqModel, config: DictConfig, precision: str, device: str) -> FairseqModel:
    """As fairseq-generate prepares a model."""
    model.to(device=device, dtype=DTYPES[type_of_numbers(precision, device)])
    model.prepare_for_inference_(config)
    return model


def decoder(task: FairseqTask, model: FairseqModel, config: DictConfig, device: str, fixed: bool) -> Candidate:
    """A function that decodes a batch and gives the number of tokens; `fixed`: of as many steps as its targets have."""
    generator = task.build_generator([model], config.generation)

    def decode(batch: Batch) -> int:
        if fixed:
            steps = round(batch["ntokens"] / batch["nsentences"]) - 1  # end of sentence follows
            generator.min_len, generator.max_len_a, generator.max_len_b = steps, 0, steps
        sample = utils.move_to_cuda(batch) if device == "cuda" else batch
        if sides_of(type(model)) == DECODER:  # begins each sentence by itself
            sample = {"net_input": {"src_tokens": sample["net_input"]["src_tokens"][:, :1]}}
        return sum(len(hypotheses[0]["tokens"]) for hypotheses in task.inference_step(generator, [model], sample))

    return decode
