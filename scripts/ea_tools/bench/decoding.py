"""How fast decoding is, ours and fairseq's Transformer: what fairseq-generate does for each batch, start-up left out.

Both models stand in one process and take turns on the same batches. Tokens are counted as fairseq-generate counts them:
those of the best hypotheses. Models with random weights never end a sentence by themselves: each of their sentences is
decoded for as many steps as the targets of its batch have tokens on average. --run-pair takes two trained runs instead.

    scripts/benchmark_decoding.sh --size lite --threads 2
    scripts/benchmark_decoding.sh --run-pair runs/OURS runs/STOCK --data data/multi30k-de-en
"""

from pathlib import Path

import torch
from fairseq import utils
from fairseq.checkpoint_utils import load_model_ensemble
from tqdm import tqdm

from ea_tools.bench.common import (
    DTYPES,
    PAIRS,
    add_corpus_options,
    calls,
    configuration,
    corpus,
    describe,
    interleave,
    make_task,
    parser,
    pick,
    prepare,
    quiet,
    record,
    report_speeds,
    speeds,
    write,
)
from ea_tools.checkpoints import load, settings
from ea_tools.common import positive, reporting
from ea_tools.evaluate import check_dictionaries
from ea_tools.text import read_prep
from ea_tools.translate import choose


def main(arguments=None):
    """Command line: time, print, and keep everything in --output."""
    args = parse(arguments)
    results = []
    with reporting("benchmark_decoding"):
        device = prepare(args)
        for subject in [args.run_pair] if args.run_pair else args.size:
            for precision in args.precision:
                for beam in args.beam:
                    for batch in args.batch:
                        results.append(measure(args, device, subject, precision, beam, batch))
                        write(args.output, record("decoding", args, device, results))
    print(f"written: {args.output}")


def parse(arguments):
    found = parser(__doc__, "decoding")
    found.add_argument("--size", nargs="+", choices=PAIRS, default=["lite"], help="pair of models (default: lite)")
    found.add_argument("--run-pair", nargs=2, type=Path, metavar=("OURS", "STOCK"), help="two trained runs instead")
    found.add_argument("--precision", nargs="+", choices=DTYPES, default=["fp32"], help="(default: fp32)")
    found.add_argument("--beam", nargs="+", type=positive, default=[1, 5], metavar="N", help="(default: 1 5)")
    found.add_argument(
        "--batch", nargs="+", choices=("1", "full"), default=["1", "full"], help="sentences at once (default: 1 full)"
    )
    found.add_argument(
        "--max-tokens", type=positive, default=12000, metavar="N", help="of a full batch (default: fairseq's, 12000)"
    )
    found.add_argument("--subset", default="test", metavar="SPLIT", help="of --data (default: test)")
    add_corpus_options(found)
    args = found.parse_args(arguments)
    if args.run_pair and not args.data:
        found.error("--run-pair needs the --data of its runs")
    if "fp16" in args.precision and (args.device == "cpu" or not torch.cuda.is_available()):
        found.error("--precision fp16 needs a GPU")
    return args


def measure(args, device, subject, precision, beam, batch):
    """Speed of one pair of models; `subject`: a key of PAIRS, or two folders with trained runs."""
    config = configuration("transformer", data=args.data or "data", device=device)  # what differs, a model brings along
    config.generation.beam = beam
    task = make_task(args, config)
    if isinstance(subject, str):
        archs, runs, label = PAIRS[subject], None, subject
        models = {name: random_model(args, task, arch) for name, arch in archs.items()}
    else:
        runs, label = dict(zip(("ours", "stock"), subject, strict=True)), "trained"
        archs, models = trained(args, task, runs)
    limits = {"max_sentences": 1} if batch == "1" else {"max_tokens": args.max_tokens}
    batches = pick(corpus(args, task, args.subset), args.batches, args.seed, **limits)
    decoders = {
        name: decoder(task, ready(model, config, precision, device), config, device, fixed=runs is None)
        for name, model in models.items()
    }
    label += f" {precision}, beam {beam}, batch {batch}"
    with tqdm(total=calls(2, len(batches), args.repetitions), desc=label, unit=" batches", mininterval=1) as progress:
        times = interleave(decoders, batches, args.repetitions, device, progress)
    result = {
        "size": subject if runs is None else None,
        "runs": runs and {name: str(path) for name, path in runs.items()},
        "architectures": archs,
        "precision": precision,
        "beam": beam,
        "batch": batch,
        "batches": [describe(found) for found in batches],
        **speeds(times),
        "times": times,
    }
    report_speeds(label, result, device)
    return result


def random_model(args, task, arch):
    """A model as if it came from a checkpoint: loading may change which path fairseq's encoder takes."""
    config = configuration(arch, "--share-all-embeddings", data=args.data or "data")
    torch.manual_seed(args.seed)
    model = task.build_model(config.model)
    model.load_state_dict(model.state_dict())
    return model


def trained(args, task, runs):
    """{name: architecture}, {name: model} of two trained runs, each the checkpoint that scripts/translate.sh takes."""
    archs, models = {}, {}
    for name, run in runs.items():
        path = choose(run)
        state = load(path)
        check_dictionaries(args.data, read_prep(args.data), path, state)
        archs[name] = settings(state)["arch"]
        (models[name],), _ = load_model_ensemble([str(path)], task=task)
    return archs, models


def ready(model, config, precision, device):
    """As fairseq-generate prepares a model."""
    model.to(device=device, dtype=DTYPES[precision])
    model.prepare_for_inference_(config)
    return model


def decoder(task, model, config, device, fixed):
    """A function that decodes a batch and gives the number of tokens; `fixed`: of as many steps as its targets have."""
    generator = task.build_generator([model], config.generation)

    def decode(batch):
        if fixed:
            steps = round(batch["ntokens"] / batch["nsentences"]) - 1  # end of sentence follows
            generator.min_len, generator.max_len_a, generator.max_len_b = steps, 0, steps
        sample = utils.move_to_cuda(batch) if device == "cuda" else batch
        return sum(len(found[0]["tokens"]) for found in task.inference_step(generator, [model], sample))

    return decode


if __name__ == "__main__":
    quiet()
    main()
