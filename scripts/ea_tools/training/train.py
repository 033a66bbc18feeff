"""Train a recipe with an architecture, on the machine's GPUs or its CPU (scripts/train.sh).

The effective batch is the recipe's on every number of GPUs that divides it: accumulation (--update-freq) makes up for
those missing.
Run the same command again to resume from the newest checkpoint that loads; a finished run says so and stops.
Any flag of fairseq-train may follow, and replaces the recipe's: --max-update 1000 --seed 2 --encoder-layers 4
Adam updates all parameters in one call, and differs from fairseq's by rounding; --use-old-adam takes fairseq's.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ea_artifacts.checkpoints import load, settings
from ea_artifacts.command import (
    REPO,
    Flags,
    Parser,
    UserError,
    at_least,
    parse_flags,
    portable,
    positive,
    reporting,
    say,
)
from ea_artifacts.files import replacing
from ea_artifacts.preparation import FILE, Preparation, fingerprint
from ea_artifacts.run import Run
from ea_tools.metrics import validation_flags
from ea_tools.training import flag_faults, products, recipes, run_folder
from ea_tools.training.launch import Launch, choose_precision, distribution, host_and_port
from ea_tools.training.recipes import Recipe, flag_values, spell_flags

#: fairseq-train's flags that are this program's to give -> what stands for them
ELSEWHERE = {
    "save-dir": "use --run",
    "arch": "ARCH stands after RECIPE",
    "cpu": "use --gpus 0",
    "distributed-world-size": "use --gpus",
    **dict.fromkeys(("source-lang", "target-lang"), "RECIPE or --data says it; prepare data of another direction anew"),
    "restore-file": "a run goes on from its own checkpoints; use --finetune-from-model to start from another's",
}
#: Flags that have no place in a recipe -> what stands for them
NOT_IN_RECIPES = {
    **ELSEWHERE,
    **dict.fromkeys(("max-tokens", "update-freq"), "use [batch]"),
    **dict.fromkeys(recipes.PRECISIONS, "use --precision of train.sh"),
}
# Beginnings of flags that define the model: a run cannot go on with other values of them.
IDENTITY = (
    *("ea-", "encoder-", "decoder-", "share-", "layernorm-", "activation-", "seed", "criterion", "optimizer"),
    *("no-scale-embedding", "no-token-positional-embeddings", "no-cross-attention", "adaptive-"),
)


@dataclass(frozen=True)
class Plan:
    """One start of a training: the model, the flags, and the process."""

    recipe: Recipe
    arch: str
    data: Path
    run: Path
    launch: Launch
    flags: Flags
    optional: list[str]  # flags of the recipe that are left out where fairseq-train does not take them
    own_flags: Flags  # of ea_tools.training.fairseq_train, which starts fairseq-train
    launcher: list[str]  # the words that start Python
    environment: dict[str, str]

    @property
    def command(self) -> list[str]:
        """The command that trains."""
        script = str(REPO / "scripts" / "ea_tools" / "training" / "fairseq_train.py")
        return [*self.launcher, script, *spell_flags(self.own_flags), *self.fairseq_words]

    @property
    def fairseq_words(self) -> list[str]:
        """The words of the command that fairseq-train gets, without those that start it."""
        return [str(self.data), *spell_flags(self.flags)]

    def without(self, names: Sequence[str]) -> Plan:
        """The same without these flags of the recipe; says which."""
        if names:
            spelt = " ".join(f"--{name}" for name in names)
            say(f"note: left out of the recipe, since the parts that you chose do not take it: {spelt}")
        return replace(self, flags={name: values for name, values in self.flags.items() if name not in names})


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: plan the run, take its folder, mend the leftovers of a kill, and become fairseq-train."""
    with reporting("train"):
        args, flags, start, toml = prepare(sys.argv[1:] if arguments is None else arguments)
        made = f"no recipe was given; this is the one for {args.data}, which the run keeps as recipe.toml:\n\n{toml}"
        if args.dry_run:
            if toml:
                say(made)
            where = f"PYTHONPATH={start.environment.get('PYTHONPATH', '')}"  # from scripts/lib.sh
            print(shlex.join(["env", where, *start.command]))
            return
        check_data(start.data, start.recipe, start.flags)
        is_first = start.launch.rank == 0  # of several machines one writes
        if is_first:
            run_folder.take(start.run)
            run_folder.claim(start.run, identity(start), args.command, start.data)
            if toml and not run_folder.started(start.run):  # later it may have been edited
                say(made)
                with replacing(start.run / "recipe.toml") as temporary:
                    temporary.write_text(toml, encoding="utf-8")
            last = run_folder.mend(start.run)
            run_folder.require_same_metric(start.run, start.flags)
        else:
            last = run_folder.whole_last(start.run)
        if reason := run_folder.finished(last, start.flags):
            run_folder.refuse_other_flags(start.run, flags, args.without)
            say(f"{start.run}: this run is finished: {reason}")
            if is_first and not Run(start.run).has_model_recorded:  # a kill came before
                say(f"the model of {start.run} is {run_folder.settle_model(start.run).name}")
            say(f"next: {run_folder.next_command(start.data, start.run)}")
            return
        if is_first:
            done, every_flag = run_folder.updates(last) if last else 0, start.flags | start.own_flags
            run_folder.record_start(start.run, every_flag, start.launch, done, args.command)
    if last:
        say(f"{start.run}: goes on after {run_folder.updates(last):,} updates")
    os.execve(start.command[0], start.command, start.environment)


def prepare(arguments: Sequence[str]) -> tuple[argparse.Namespace, Flags, Plan, str]:
    """A command line's options, its flags for fairseq-train, the plan, and the recipe that was made for it as TOML."""
    args, flags = parse(arguments)
    flag_faults.check_architecture(args.arch, "ARCH ")
    recipe, toml = (recipes.read(args.recipe), "") if args.recipe else recipes.for_data(args.data.resolve())
    start = plan(recipe, args, flags, Launch.of(args))
    if flags or args.recipe.endswith(".toml") or args.arch not in flag_faults.ours():
        parsed, left_out = flag_faults.parse(start.fairseq_words, args.own_flags, start.optional)
        check_metric(parsed)
        useless = flag_faults.useless(parsed)
        for name in filter(useless.get, flags):
            raise UserError(useless[name])
        start = start.without([*left_out, *(name for name in useless if name in start.flags)])
        if not args.dry_run:
            check_first_model(start.flags, start.data, parsed)
    return args, flags, start, toml


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Flags]:
    """Our own options, and the flags for fairseq-train as {name: values}."""
    parser = Parser(
        prog="train.sh",
        usage="train.sh RECIPE ARCH [options] [fairseq-train flags]\n       train.sh --data DIR ARCH [options] [...]",
        description=__doc__,
        allow_abbrev=False,
        epilog="recipes: " + ", ".join(recipes.names()),
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RECIPE ARCH",
        help="RECIPE: one of those below, or a .toml file of your own; without one, --data DIR is trained on with a "
        "recipe by its size. ARCH: ea_transformer_lite, ea_transformer_base, transformer_lite, ...",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data (default: the recipe's, data/NAME)")
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run's folder (default: runs/RECIPE-ARCH)")
    parser.add_argument("--dry-run", action="store_true", help="print the command and train nothing")
    parser.add_argument("--gpus", type=at_least(0), metavar="N", help="GPUs on each machine (default: all; 0: the CPU)")
    nodes, rank = (os.environ.get(f"SLURM_{name}") for name in ("NNODES", "NODEID"))
    add = parser.add_argument
    add("--nodes", type=positive, default=nodes, metavar="N", help="machines (default: SLURM's number, or 1)")
    which = "which of them this is, from 0 (default: SLURM's)"
    add("--node-rank", type=at_least(0), default=rank, metavar="R", help=which)
    master = "machine 0 (default: SLURM's first host; port 29500)"
    add("--master", type=host_and_port, metavar="HOST[:PORT]", help=master)
    precision = "(default: bf16 or fp16 on a GPU that has it, else fp32)"
    parser.add_argument("--precision", choices=("auto", "fp32", "fp16", "bf16"), default="auto", help=precision)
    parser.add_argument("--eval-bleu", action="store_true", help="BLEU at each validation; it decides which is best")
    parser.add_argument("--no-tensorboard", action="store_true", help="without the log in RUN/tensorboard")
    parser.add_argument("--without", action="append", default=[], metavar="FLAG", help="leave out a flag of the recipe")
    if "--" in arguments:
        parser.error("--: fairseq-train's flags stand without it here; leave it out")
    args, rest = parser.parse_known_args(arguments)
    if len(args.words) > 2 or (len(args.words) == 1 and args.data is None):
        parser.error("expected RECIPE and ARCH first, or --data DIR and ARCH")
    args.recipe, args.arch = ["", *args.words][-2:]
    try:
        flags = parse_flags(rest)
    except UserError as error:
        parser.error(str(error))
    for name, instead in ELSEWHERE.items():
        if name in flags:
            parser.error(f"--{name} cannot be used here: {instead}")
    for name, path in (("--run", args.run), ("--data", args.data)):
        if path and (fault := next((mark for mark in (":", "${") if mark in str(path)), None)):
            parser.error(f"{name} {path}: {fault} means something else to fairseq; choose a name without it")
    args.own_flags = flag_faults.flags_of(parser)
    args.command = portable(["scripts/train.sh", *arguments])
    args.data = (args.data or recipes.read(args.recipe).data).absolute()  # checkpoints name it
    learnt = Path(args.recipe or args.data.resolve()).name.removesuffix(".toml")
    args.run = args.run or REPO / "runs" / f"{learnt}-{args.arch}"
    return args, flags


def plan(recipe: Recipe, args: argparse.Namespace, flags: Flags, launch: Launch) -> Plan:
    """The plan of a command line. `flags` are those for fairseq-train, and replace the recipe's."""
    chosen = {**recipe.flags_for(args.arch)}
    for name in sorted(chosen.keys() & NOT_IN_RECIPES.keys()):
        raise UserError(f"--{name}: is not allowed in the recipe {recipe.name}; {NOT_IN_RECIPES[name]}")
    if recipe.eval_bleu and not args.eval_bleu and (args.data / FILE).is_file():  # --dry-run needs no data
        chosen |= validation_flags(Preparation.at(args.data), decides=False)
    for name in args.without:
        if chosen.pop(name.removeprefix("--"), None) is None:
            raise UserError(f"--without {name}: the recipe has no such flag")
    may_go = recipes.common_flags()
    optional = [name for name in chosen if name not in flags and (name in may_go or name.startswith("eval-"))]
    chosen |= batch_flags(recipe, launch, flags)
    by_flag = [name for name in recipes.PRECISIONS if name in flags]
    if by_flag and args.precision != "auto":
        raise UserError(f"--precision {args.precision} and --{by_flag[0]}: give one of them")
    precision = "fp32" if by_flag else choose_precision(args.precision, launch)
    if launch.gpus and precision != "fp32":
        chosen[precision] = True
    chosen = {"log-interval": 100, "log-format": "simple"} | chosen
    if args.eval_bleu:
        chosen |= validation_flags(Preparation.at(args.data))
    if not args.no_tensorboard:
        chosen["tensorboard-logdir"] = args.run / "tensorboard"
    chosen |= flags
    if by_flag and not launch.gpus:
        raise UserError(
            f"--{by_flag[0]}: needs a GPU; leave it out, or take --precision bf16 on a CPU that has units for it"
        )
    distributed, launcher, environment = distribution(launch)
    given = {
        "user-dir": REPO / "ea_fairseq",
        "arch": args.arch,
        "source-lang": recipe.source_lang,
        "target-lang": recipe.target_lang,
        "save-dir": args.run,
    }
    everything = flag_values(given | chosen | distributed)
    own: Flags = {products.FLAG: []} if precision == "bf16" and not launch.gpus else {}
    return Plan(recipe, args.arch, args.data, args.run, launch, everything, optional, own, launcher, environment)


def batch_flags(recipe: Recipe, launch: Launch, flags: Flags) -> dict[str, int]:
    """--max-tokens and --update-freq that keep the recipe's effective batch; says how."""
    for name in ("max-tokens", "update-freq"):
        value = ",".join(flags.get(name, ["1"]))
        if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", value):
            raise UserError(f"--{name} {value}: expected a whole number of at least 1")
    tokens = int(flags["max-tokens"][0]) if "max-tokens" in flags else recipe.batch.tokens
    per_step = launch.processes * tokens
    if "update-freq" in flags:
        now = int(flags["update-freq"][0].split(",")[0]) * per_step
        say(f"effective batch: {now:,} tokens an update by --update-freq; the recipe's is {recipe.batch.total:,}")
        return {"max-tokens": tokens}
    if per_step > recipe.batch.total and "max-tokens" not in flags and recipe.batch.total % launch.processes == 0:
        tokens = recipe.batch.total // launch.processes
        per_step = recipe.batch.total
    accumulation, rest = divmod(recipe.batch.total, per_step)
    if rest or not accumulation:
        raise UserError(
            f"{recipe.name} trains with {recipe.batch} = {recipe.batch.total:,} tokens an update. {launch} x "
            f"{tokens:,} tokens = {per_step:,} does not divide that.\nChoose with --gpus a number of GPUs that does, "
            "other --max-tokens, or leave the recipe's batch with an --update-freq of your own."
        )
    smaller = {}
    if tokens < recipe.batch.tokens:
        say(f"note: sentences of more than {tokens:,} tokens do not fit into a step and are left out of training")
        smaller["max-tokens-valid"] = recipe.flags.get("max-tokens-valid", recipe.batch.tokens)  # which leaves none out
    say(
        f"effective batch: {launch} x {accumulation} accumulation x {tokens:,} tokens = {recipe.batch.total:,} tokens "
        f"an update, the recipe's {recipe.batch}"
    )
    return {"max-tokens": tokens, "update-freq": accumulation, **smaller}


def check_data(data: Path, recipe: Recipe, flags: Flags) -> None:
    """The data folder must be there, complete, of the recipe's languages, and of dictionaries that fit the flags."""
    preparation = Preparation.at(data)
    languages = preparation.languages
    if preparation.separate_dictionaries and "share-all-embeddings" in flags:
        raise UserError(
            f"--share-all-embeddings: {data} has a dictionary for each language; replace the flag by --without "
            "share-all-embeddings --share-decoder-input-output-embed, or prepare the data with --joint-dictionary"
        )
    if languages != (recipe.source_lang, recipe.target_lang):
        raise UserError(
            f"{data} is {'-'.join(languages)}, the recipe {recipe.name} is {recipe.source_lang}-{recipe.target_lang}; "
            "choose another recipe, or another --data"
        )


#: Ends of the names of metrics -> whether more is better
MORE_IS_BETTER = {"loss": False, "ppl": False, "bleu": True, "accuracy": True}


def check_metric(parsed: argparse.Namespace) -> None:
    """Refuse a metric whose worst value would count as the best: fairseq minimises unless a flag says otherwise."""
    metric, flag = parsed.best_checkpoint_metric, "--maximize-best-checkpoint-metric"
    wanted = next((more for end, more in MORE_IS_BETTER.items() if metric.endswith(end)), None)
    if wanted not in (None, parsed.maximize_best_checkpoint_metric):
        raise UserError(f"--best-checkpoint-metric {metric}: {'add' if wanted else 'leave out'} {flag}")


def check_first_model(flags: Flags, data: Path, parsed: argparse.Namespace) -> None:
    """The model that a training starts from must compute the same function, and have the same subwords."""
    for name in flags.get("finetune-from-model", []):
        from ea_fairseq.from_plain import check_same_function

        try:
            check_same_function(name, settings(load(name)), parsed, ("encoder", "decoder"))
        except UserError as error:  # which begins with the name
            raise UserError(f"--finetune-from-model {error}") from None
        except ValueError as error:
            raise UserError(f"--finetune-from-model {name}: {error}") from None
        run = Path(name).parent
        if (kept := Preparation.kept_by(run)) is None:
            continue
        try:
            kept.require_same(Preparation.at(data), run)
        except UserError as error:
            hint = f"data-prep/custom.sh --like {run} prepares text for this model"
            raise UserError(f"--finetune-from-model {name}: {error}\n{hint}") from error


def identity(start: Plan) -> dict[str, str]:
    """The settings that must not change while a run goes on: recipe, architecture, data, the flags of the model."""
    model = {name: " ".join(values) for name, values in start.flags.items() if name.startswith(IDENTITY)}
    return {"recipe": start.recipe.name, "arch": start.arch, "data": fingerprint(start.data), **model}
