"""Train a recipe with an architecture, on the GPUs that there are or on the CPU; scripts/train.sh is how it is called.

The effective batch is the recipe's on any number of GPUs: the accumulation (--update-freq) makes up for those missing.
Run the same command again and it goes on, from the newest checkpoint that loads; a finished run says so and stops.
Any flag of fairseq-train may follow, and replaces the recipe's: --max-update 1000 --seed 2 --encoder-layers 4
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ea_tools import recipes
from ea_tools.checkpoints import EPOCH, UPDATE, DamagedError, load, numbered
from ea_tools.common import REPO, UserError, portable, replacing, reporting
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
    command: list[str]
    environment: dict[str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: plan the run, take its folder, mend what a kill left, and become fairseq-train."""
    args, flags = parse(sys.argv[1:] if arguments is None else arguments)
    with reporting("train"):
        start = plan(recipes.read(args.recipe), args, flags, Launch.of(args))
        if args.dry_run:
            print(shlex.join(start.command))
            return
        check_data(start.data, start.recipe)
        if start.launch.rank == 0:
            take(start.run)
            claim(start.run, identity(start), args.command)
            last = mend(start.run)
        else:
            last = load(start.run / LAST) if (start.run / LAST).exists() else None
        if reason := finished(last, start.flags):
            say(f"{start.run}: this run is finished: {reason}")
            return
        if start.launch.rank == 0:
            record_start(start.run, start.flags, start.launch, updates(last) if last else 0)
    if last:
        say(f"{start.run}: goes on after {updates(last):,} updates")
    say("+ " + shlex.join(start.command))
    os.execve(start.command[0], start.command, start.environment)


def say(text: str) -> None:
    """Print a line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Flags]:
    """Our own options, and the flags for fairseq-train as {name: values}."""
    parser = argparse.ArgumentParser(
        prog="train.sh",
        usage="train.sh RECIPE ARCH [options] [fairseq-train flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="recipes: " + ", ".join(recipes.names()),
    )
    parser.add_argument("recipe", metavar="RECIPE", help="one of the recipes below, or a .toml file of your own")
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
    if len(arguments) > 1 and not (arguments[0].startswith("-") or arguments[1].startswith("-")):
        args, rest = parser.parse_known_args(arguments)
    elif {"-h", "--help"} & set(arguments):
        parser.parse_args(["--help"])
    else:
        parser.error("RECIPE and ARCH come first")
    try:
        flags = parse_flags(rest)
    except UserError as error:
        parser.error(str(error))
    for name in ("save-dir", "arch", "restore-file"):
        if name in flags:
            parser.error(f"--{name} is not to be given here: {'use --run' if name == 'save-dir' else 'see --help'}")
    args.command = portable(["scripts/train.sh", *arguments])
    args.data = args.data or _default(lambda: recipes.read(args.recipe).data, parser)
    args.run = args.run or REPO / "runs" / f"{Path(args.recipe).stem}-{args.arch}"
    return args, flags


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
    chosen |= precision_flags(args.precision, launch)
    chosen |= {"log-interval": 100, "log-format": "simple"}
    if args.eval_bleu:
        chosen |= validation_flags(read_prep(args.data))
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
    command = [*launcher, script, str(args.data), *spell_flags(everything)]
    return Plan(recipe, args.arch, args.data, args.run, launch, everything, command, environment)


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


def precision_flags(wanted: str, launch: Launch) -> dict[str, bool]:
    """bf16 from compute capability 8.0 (A100), fp16 from 7.0 (V100, tensor cores), else fp32."""
    if wanted == "auto":
        capability = launch.capability if launch.gpus else None
        wanted = "fp32" if not capability or capability < (7, 0) else "fp16" if capability < (8, 0) else "bf16"
    return {} if wanted == "fp32" else {wanted: True}


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


def fingerprint(data: Path) -> str:
    """A digest of the training data: the dictionaries, and the index of the binary text."""
    digest = hashlib.sha256()
    for path in sorted([*data.glob("dict.*.txt"), *data.glob("train.*.idx")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


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
    starts = json.loads(record.read_text(encoding="utf-8")).get("starts", []) if record.exists() and started else []
    _write_record(run, {"identity": this, "command": command, "starts": starts})


def record_start(run: Path, flags: Flags, launch: Launch, done: int) -> None:
    """Add to run.json that training starts, or goes on after `done` updates: on which code, device and flags.

    A run that was stopped and went on after a change of the code or of a flag says so by this.
    """
    machine = {"user-dir", "save-dir", "tensorboard-logdir", "wandb-project"}
    start = {
        "updates": done,
        **provenance(on_cpu=not launch.gpus),
        "processes": launch.processes,
        "flags": {name: " ".join(values) for name, values in flags.items() if name not in machine},
    }
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    _write_record(run, {**record, "starts": [*record["starts"], start]})


def _write_record(run: Path, record: dict[str, Any]) -> None:
    with replacing(run / "run.json") as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


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


if __name__ == "__main__":
    main()
