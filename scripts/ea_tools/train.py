"""Train a recipe with an architecture, on the GPUs that there are or on the CPU; scripts/train.sh is how it is called.

The effective batch is the recipe's on any number of GPUs: the accumulation (--update-freq) makes up for those missing.
Run the same command again and it goes on, from the newest checkpoint that loads; a finished run says so and stops.
Any flag of fairseq-train may follow, and replaces the recipe's: --max-update 1000 --seed 2 --encoder-layers 4
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ea_tools import flag_faults, products, recipes
from ea_tools.checkpoints import EPOCH, UPDATE, DamagedError, load, numbered
from ea_tools.common import REPO, UserError, portable, replacing, reporting
from ea_tools.preparation import fingerprint, keep, kept_by, require_same
from ea_tools.provenance import provenance
from ea_tools.recipes import Recipe, flag_values, parse_flags, spell_flags
from ea_tools.scores import validation_flags
from ea_tools.text import read_prep

# A flag that changes none of these belongs to the launch; one that does makes another model of the run.
IDENTITY = ("ea-", "encoder-", "decoder-", "share-", "layernorm-", "activation-", "seed", "criterion", "optimizer")
LAST = "checkpoint_last.pt"


Flags = dict[str, list[str]]  # of fairseq-train: name -> the words after it


@dataclass(frozen=True)
class Plan:
    """One start of a training: what is trained, with which flags, and the process that does it."""

    recipe: Recipe
    arch: str
    data: Path
    run: Path
    launch: Launch
    flags: Flags
    own_flags: Flags  # of ea_tools.fairseq_train, which starts fairseq-train
    command: list[str]
    environment: dict[str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: plan the run, take its folder, mend what a kill left, and become fairseq-train."""
    args, flags = parse(sys.argv[1:] if arguments is None else arguments)
    with reporting("train"):
        recipe, toml = (recipes.read(args.recipe), "") if args.recipe else recipes.for_data(args.data)
        if toml:
            say(f"no recipe was given; this is the one for {args.data}, which the run keeps as recipe.toml:\n\n{toml}")
        check_values(flags, args)
        start = plan(recipe, args, flags, Launch.of(args))
        flag_faults.check(args.arch, fairseq_words(start), flags_given=bool(flags))
        if args.dry_run:
            print(shlex.join(start.command))
            return
        check_data(start.data, start.recipe)
        if start.launch.rank == 0:
            take(start.run)
            claim(start.run, identity(start), args.command)
            keep_preparation(start.run, start.data)
            if toml:
                _write(start.run / "recipe.toml", toml)
            last = mend(start.run)
        else:
            last = load(start.run / LAST) if (start.run / LAST).exists() else None
        if reason := finished(last, start.flags):
            say(f"{start.run}: this run is finished: {reason}")
            say(f"next: {next_command(start.data, start.run)}")
            return
        if start.launch.rank == 0:
            done, every_flag = updates(last) if last else 0, start.flags | start.own_flags
            record_start(start.run, every_flag, start.launch, done, args.command)
    if last:
        say(f"{start.run}: goes on after {updates(last):,} updates")
    os.execve(start.command[0], start.command, start.environment)


def say(text: str) -> None:
    """Print a line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Flags]:
    """Our own options, and the flags for fairseq-train as {name: values}."""
    parser = argparse.ArgumentParser(
        prog="train.sh",
        usage="train.sh RECIPE ARCH [options] [fairseq-train flags]\n       train.sh --data DIR ARCH [options] [...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="recipes: " + ", ".join(recipes.names()),
    )
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="one of the recipes below, or a .toml file of your own; without "
        "one, --data DIR is trained on with a recipe by its size",
    )
    parser.add_argument("arch", metavar="ARCH", help="ea_transformer_lite, ea_transformer_base, transformer_lite, ...")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data (default: the recipe's, data/NAME)")
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run's folder (default: runs/RECIPE-ARCH)")
    parser.add_argument("--dry-run", action="store_true", help="print the command and train nothing")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs a machine (default: all; 0 is the CPU)")
    parser.add_argument("--nodes", type=int, metavar="N", help="machines (default: SLURM's number, or 1)")
    parser.add_argument("--node-rank", type=int, metavar="R", help="which of them this is, from 0 (default: SLURM's)")
    parser.add_argument("--master", metavar="HOST[:PORT]", help="machine 0 (default: SLURM's first host; port 29500)")
    parser.add_argument("--precision", choices=("auto", "fp32", "fp16", "bf16"), default="auto")
    parser.add_argument("--eval-bleu", action="store_true", help="BLEU at each validation; it decides which is best")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases too")
    parser.add_argument("--no-tensorboard", action="store_true", help="without the log in RUN/tensorboard")
    parser.add_argument("--without", action="append", default=[], metavar="FLAG", help="leave out a flag of the recipe")
    if {"-h", "--help"} & set(arguments):
        parser.parse_args(["--help"])
    words = _data_last(arguments)
    leading = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    if leading == 1 and words[leading:] and words[-2] == "--data":
        words = ["", *words]  # no recipe: one is made for the data
    elif leading < 2:
        parser.error("RECIPE and ARCH come first, or --data DIR and ARCH")
    args, rest = parser.parse_known_args(words)
    try:
        flags = parse_flags(rest)
    except UserError as error:
        parser.error(str(error))
    for name in ("save-dir", "arch", "restore-file"):
        if name in flags:
            parser.error(f"--{name} is not to be given here: {'use --run' if name == 'save-dir' else 'see --help'}")
    args.command = portable(["scripts/train.sh", *arguments])
    args.data = args.data or _default(lambda: recipes.read(args.recipe).data, parser)
    args.run = args.run or REPO / "runs" / f"{Path(args.recipe or args.data.resolve()).stem}-{args.arch}"
    return args, flags


def _data_last(arguments: Sequence[str]) -> list[str]:
    """The words with --data and its value at the end, so that RECIPE and ARCH may stand after it, too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data")
    given, rest = parser.parse_known_args(arguments)
    return rest if given.data is None else [*rest, "--data", given.data]


def _default(make: Callable[[], Path], parser: argparse.ArgumentParser) -> Path:
    try:
        return make()
    except UserError as error:
        parser.exit(1, f"train: {error}\n")


@dataclass(frozen=True)
class Launch:
    """Where the processes go: `gpus` (0 is the CPU) on each of `nodes` machines, this one being number `rank`."""

    gpus: int
    capability: tuple[int, int] | None = None  # of the least of the GPUs
    nodes: int = 1
    rank: int = 0
    host: str = "localhost"
    port: int = 29500

    @classmethod
    def of(cls, args: argparse.Namespace) -> Launch:
        """What the command line says, else SLURM's variables, else what this machine has."""
        there, capability = (0, None) if args.gpus == 0 else gpus()
        wanted = there if args.gpus is None else args.gpus
        if wanted > there and not args.dry_run:
            raise UserError(f"--gpus {wanted}: this machine has {there}")
        if wanted < 0:
            raise UserError(f"--gpus {wanted}: cannot be negative")
        slurm = os.environ
        nodes = args.nodes or int(slurm.get("SLURM_NNODES", 1))
        if nodes == 1:
            return cls(wanted, capability)
        rank = args.node_rank if args.node_rank is not None else slurm.get("SLURM_NODEID")
        master = args.master or _slurm_master(slurm.get("SLURM_JOB_NODELIST"))
        if rank is None or master is None:
            raise UserError(f"{nodes} machines need --node-rank and --master HOST[:PORT], outside SLURM")
        if not 0 <= int(rank) < nodes:
            raise UserError(f"--node-rank {rank}: with --nodes {nodes} it is 0 to {nodes - 1}")
        host, _, port = master.partition(":")
        return cls(wanted, capability, nodes, int(rank), host, int(port or 29500))

    @property
    def processes(self) -> int:
        """How many processes train, on all machines together."""
        return max(self.gpus, 1) * self.nodes

    def __str__(self) -> str:
        what = f"{self.gpus} GPU" if self.gpus else "CPU"
        return what if self.nodes == 1 else f"{self.nodes} machines x {what}"


#: What a GPU's driver puts there: NVIDIA's, AMD's, and Windows' for Linux inside it.
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def gpus() -> tuple[int, tuple[int, int] | None]:
    """How many GPUs there are, and the least compute capability among them.

    PyTorch is only asked where there is a driver, for its import takes seconds.
    """
    if not any(Path(driver).exists() for driver in DRIVERS):
        return 0, None
    import torch

    count = torch.cuda.device_count()
    return count, min((torch.cuda.get_device_capability(i) for i in range(count)), default=None)


def _slurm_master(nodelist: str | None) -> str | None:
    if not nodelist:
        return None
    hosts = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=True)
    return hosts.stdout.split()[0]


def plan(recipe: Recipe, args: argparse.Namespace, flags: Flags, launch: Launch) -> Plan:
    """What the command line asks for. `flags` are those for fairseq-train, and replace the recipe's."""
    chosen = {**recipe.flags_for(args.arch)}
    for name in args.without:
        if chosen.pop(name.removeprefix("--"), None) is None:
            raise UserError(f"--without {name}: the recipe has no such flag")
    chosen |= batch_flags(recipe, launch, flags)
    precision = choose_precision(args.precision, launch)
    if launch.gpus and precision != "fp32":
        chosen[precision] = True
    chosen |= {"log-interval": 100, "log-format": "simple"}
    if args.eval_bleu:
        chosen |= validation_flags(read_prep(args.data))
    elif recipe.eval_bleu and (args.data / "PREP.json").is_file():  # --dry-run needs no data
        chosen |= validation_flags(read_prep(args.data), decides=False)
    if args.wandb:
        chosen["wandb-project"] = args.wandb
    if not args.no_tensorboard:
        chosen["tensorboard-logdir"] = args.run / "tensorboard"
    chosen |= flags
    often = [name for name in ("save-interval-updates", "validate-interval-updates") if name in chosen]
    if often and "patience" in chosen:
        say(f"note: --patience counts validations, and with --{often[0]} there may be several in an epoch")

    distributed, launcher, environment = distribution(launch)
    given = {
        "user-dir": REPO / "ea_fairseq",
        "arch": args.arch,
        "source-lang": recipe.source_lang,
        "target-lang": recipe.target_lang,
        "save-dir": args.run,
    }
    everything = flag_values(given | chosen | distributed)
    script = str(REPO / "scripts" / "ea_tools" / "fairseq_train.py")
    own: Flags = {products.FLAG: []} if precision == "bf16" and not launch.gpus else {}
    command = [*launcher, script, *spell_flags(own), str(args.data), *spell_flags(everything)]
    return Plan(recipe, args.arch, args.data, args.run, launch, everything, own, command, environment)


def fairseq_words(start: Plan) -> list[str]:
    """The words of a command that fairseq-train gets, without those that start it."""
    return [str(start.data), *spell_flags(start.flags)]


def check_values(flags: Flags, args: argparse.Namespace) -> None:
    """Refuse values that fairseq-train takes, and fails by later or trains nothing sensible with."""
    for name in ("max-tokens", "batch-size", "log-interval", "update-freq"):
        for value in flags.get(name, []):
            for number in value.split(","):
                flag_faults.positive_number(name, number)
    for value in flags.get("lr", []):
        if any(number.strip().startswith("-") for number in value.strip("[]").split(",")):
            raise UserError(f"--lr {value}: must not be negative")
    if args.wandb and not args.dry_run and find_spec("wandb") is None:
        raise UserError(f"--wandb {args.wandb}: the package is not installed; .venv/bin/python -m pip install wandb")


def batch_flags(recipe: Recipe, launch: Launch, flags: Flags) -> dict[str, int]:
    """--max-tokens and --update-freq that keep the recipe's effective batch; says how."""
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
        smaller["max-tokens-valid"] = recipe.batch.tokens  # nothing is left out of validation
    say(
        f"effective batch: {launch} x {accumulation} accumulation x {tokens:,} tokens = {recipe.batch.total:,} tokens "
        f"an update, the recipe's {recipe.batch}"
    )
    return {"max-tokens": tokens, "update-freq": accumulation, **smaller}


def choose_precision(wanted: str, launch: Launch) -> str:
    """fp32, fp16 or bf16; says which and why where it was left to us.

    On a GPU bf16 from compute capability 8.0 (A100), fp16 from 7.0 (V100, tensor cores), else fp32. On a CPU fp32; bf16
    stands for float32 numbers whose matrix products are made in the CPU's units for bfloat16.
    """
    if wanted == "fp16" and not launch.gpus:
        raise UserError("--precision fp16: needs a GPU; on a CPU take fp32, or bf16 where it has units for that")
    if wanted == "bf16" and not launch.gpus:
        products.require_bf16_units()
    if wanted != "auto":
        return wanted
    if not launch.gpus:
        if products.has_bf16_units():
            say("precision: fp32; this CPU has units for bfloat16, try --precision bf16: nobody has measured its gain")
        return "fp32"
    if not launch.capability:  # --dry-run for another machine
        return "fp32"
    precision = "bf16" if launch.capability >= (8, 0) else "fp16" if launch.capability >= (7, 0) else "fp32"
    say(f"precision: {precision}, by the GPU's compute capability, {'.'.join(map(str, launch.capability))}")
    return precision


def distribution(launch: Launch) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """fairseq's distributed flags, the words that start Python, and the environment.

    One machine: fairseq starts a process for each GPU. Several: torchrun does, on each machine. Several without GPUs:
    one process on each, for which fairseq has to be told everything.
    """
    python = [sys.executable, "-u", "-P"]  # -P: what lies beside fairseq_train.py has no say in what it imports
    # SLURM's node list would make fairseq look for the other processes by itself.
    environment = {name: value for name, value in os.environ.items() if not name.endswith("NODELIST")}
    flags = {"distributed-world-size": launch.processes}
    if launch.gpus and launch.gpus < gpus()[0]:
        visible = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(launch.gpus)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[: launch.gpus])
    if not launch.gpus:
        flags["cpu"] = True
    if launch.nodes == 1:
        return flags, python, environment
    if launch.gpus:
        torchrun = [
            str(Path(sys.executable).with_name("torchrun")),
            *("--nnodes", str(launch.nodes), "--node-rank", str(launch.rank), "--nproc-per-node", str(launch.gpus)),
            *("--master-addr", launch.host, "--master-port", str(launch.port)),
        ]
        return flags, [*torchrun, "--no-python", *python], environment
    flags |= {
        "distributed-backend": "gloo",
        "ddp-backend": "legacy_ddp",
        "distributed-no-spawn": True,
        "distributed-rank": launch.rank,
        "distributed-init-method": f"tcp://{launch.host}:{launch.port}",
    }
    return flags, python, environment


def check_data(data: Path, recipe: Recipe) -> None:
    """The data folder must be there, complete, and of the recipe's languages."""
    prep = read_prep(data)
    languages = (prep["source_lang"], prep["target_lang"])
    if languages != (recipe.source_lang, recipe.target_lang):
        raise UserError(
            f"{data} is {'-'.join(languages)}, the recipe {recipe.name} is {recipe.source_lang}-{recipe.target_lang}"
        )


def identity(start: Plan) -> dict[str, str]:
    """What must not change while a run goes on: recipe, architecture, data, and the flags that make the model."""
    model = {name: " ".join(values) for name, values in start.flags.items() if name.startswith(IDENTITY)}
    return {"recipe": start.recipe.name, "arch": start.arch, "data": fingerprint(start.data), **model}


_locks = []  # open as long as the process lives


def take(run: Path) -> None:
    """Keep a second process out of the run's folder, for as long as this one and what it becomes are alive."""
    run.mkdir(parents=True, exist_ok=True)
    lock = (run / "lock").open("w")
    try:
        # A lock of the process, not of the file: it survives exec, and no worker that outlives a kill holds it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"{run}: another process trains in this folder") from None
    os.set_inheritable(lock.fileno(), True)
    _locks.append(lock)


def claim(run: Path, this: Mapping[str, str], command: str = "") -> None:
    """Write down whose folder this is, or refuse one that is somebody else's."""
    record = run / "run.json"
    started = any(run.glob("checkpoint*"))  # a run that failed before it saved anything binds nobody
    if record.exists() and started:
        owner = json.loads(record.read_text(encoding="utf-8"))["identity"]
        changed = [name for name in sorted(owner.keys() | this.keys()) if owner.get(name) != this.get(name)]
        if changed:
            raise UserError(
                f"{run} belongs to another run; choose another --run\n"
                + "\n".join(f"  {name}: there {owner.get(name)}, now {this.get(name)}" for name in changed)
            )
    elif started:
        raise UserError(f"{run} holds checkpoints that scripts/train.sh did not make; choose another --run")
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() and started else {}
    first = before.get("command", command)  # that which began the run; each start has its own
    _write_record(run, {"identity": this, "command": first, "starts": before.get("starts", [])})


def keep_preparation(run: Path, data: Path) -> None:
    """Let the run have a copy of what its model needs; where it has one, the data must still agree with it."""
    if any(run.glob("checkpoint*")) and (kept := kept_by(run)):
        require_same(kept, data, run)
    else:
        keep(run, data)


def record_start(run: Path, flags: Flags, launch: Launch, done: int, command: str = "") -> None:
    """Add to run.json that training starts, or goes on after `done` updates: when, by which command, code and flags.

    A run that was stopped and went on after a change of the code or of a flag says so by this, and on the screen.
    """
    machine = {"user-dir", "save-dir", "tensorboard-logdir", "wandb-project"}
    start = {
        "command": command,
        "updates": done,
        **provenance(on_cpu=not launch.gpus),
        "processes": launch.processes,
        "flags": {name: " ".join(values) for name, values in flags.items() if name not in machine},
    }
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    if done and record["starts"]:
        say_what_differs(record["starts"][-1].get("flags", {}), start["flags"])
    _write_record(run, {**record, "starts": [*record["starts"], start]})


def say_what_differs(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Print a note for each flag of fairseq-train that a run goes on without, with, or with another value."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            was, is_now = (flags[name] or "given" if name in flags else "not given" for flags in (before, now))
            say(f"note: --{name} is {is_now} from here on; it was {was} when this run last started")


def _write_record(run: Path, record: dict[str, Any]) -> None:
    _write(run / "run.json", json.dumps(record, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def mend(run: Path) -> dict[str, Any] | None:
    """Let checkpoint_last.pt be the newest checkpoint that loads, whatever an earlier process was in the middle of.

    Returns its contents, or None where a run starts. A checkpoint that is whole but not allowed, for it asks for more
    than weights and settings, ends this with an error and stays where it is.
    """
    for path in run.glob("*.pt.tmp"):
        path.unlink()
    files = list(run.iterdir())
    families = [[(0, run / LAST)] if (run / LAST).exists() else [], numbered(files, EPOCH), numbered(files, UPDATE)]
    newest = [loaded for family in families if (loaded := _newest_that_loads(family))]
    if not newest:
        if any(run.glob("*.damaged")):
            raise UserError(f"{run}: none of its checkpoints loads; to start again from nothing, remove the folder")
        return None
    path, state = max(newest, key=lambda loaded: updates(loaded[1]))  # the first of equals: checkpoint_last.pt
    if path.name != LAST:
        extra = state["extra_state"]
        for name in [LAST] + ["checkpoint_best.pt"] * (extra.get("best") == extra.get("val_loss") is not None):
            with replacing(run / name) as temporary:
                shutil.copyfile(path, temporary)
        say(f"train: {path.name} is newer than the {LAST} there is, or there is none: going on from it")
    return state


def _newest_that_loads(family: Iterable[tuple[int, Path]]) -> tuple[Path, dict[str, Any]] | None:
    """The last (path, contents) of [(number, path), ...] that loads; those that do not are set aside."""
    for _, path in reversed(list(family)):
        try:
            state = load(path)
            _resumable(path, state)
            return path, state
        except DamagedError as error:
            aside = path.with_name(path.name + ".damaged")
            path.replace(aside)
            say(f"train: warning: {error}\ntrain: warning: it is set aside as {aside}")
    return None


def _resumable(path: Path, state: Mapping[str, Any]) -> None:
    if "optimizer_history" not in state or "last_optimizer_state" not in state:
        raise DamagedError(f"{path}: has no optimizer state, training cannot go on from it")


def updates(state: Mapping[str, Any]) -> int:
    """How many updates a checkpoint has seen."""
    return state["optimizer_history"][-1]["num_updates"]


def finished(state: Mapping[str, Any] | None, flags: Flags) -> str | None:
    """Why a run with this last checkpoint has nothing left to do, or None."""
    if state is None:
        return None
    wanted = int(flags.get("max-update", ["0"])[0])
    if wanted and updates(state) >= wanted:
        return f"{updates(state):,} updates, --max-update is {wanted:,}"
    epochs = int(flags.get("max-epoch", ["0"])[0])
    iterator = state["extra_state"]["train_iterator"]
    if epochs and iterator["epoch"] > epochs:
        return f"--max-epoch is {epochs}"
    patience = int(flags.get("patience", ["-1"])[0])
    runs = state["extra_state"].get("early_stopping", {}).get("num_runs") or 0
    if patience > 0 and runs >= patience:
        return f"{runs:.0f} validations without improvement, --patience is {patience}"
    return None


def next_command(data: Path, run: Path) -> str:
    """What a user types after a training: scores of the average of the last checkpoints that there are, at most 10."""
    files = list(run.iterdir())
    number = min(10, max(len(numbered(files, EPOCH)), len(numbered(files, UPDATE))))
    which = ["--average", str(number)] if number else ["--best"]
    return portable(["scripts/evaluate.sh", "--data", str(data), "--run", str(run), *which])


if __name__ == "__main__":
    main()
