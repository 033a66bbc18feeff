"""The folder of a training run: its owner, the record of each start, the checkpoint from which it goes on."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from ea_artifacts.average import average, save
from ea_artifacts.checkpoints import DamagedError, load, updates_of
from ea_artifacts.command import REPO, Flags, UserError, portable, say
from ea_artifacts.files import replacing, write_json
from ea_artifacts.preparation import Preparation
from ea_artifacts.run import AVERAGED, Run
from ea_tools.training import record
from ea_tools.training.launch import Launch
from ea_tools.training.provenance import provenance
from ea_tools.training.recipes import NOT_LEARNING, PRECISIONS, plain, said

LAST, BEST = "checkpoint_last.pt", "checkpoint_best.pt"
_BEFORE = re.compile(r"lock|\..*|.*\.(log|out|err)")  # may be there before a run, as a shell's log of it

_locks: list[IO[str]] = []  # open as long as the process lives


def take(run: Path) -> None:
    """Keep a second process out of the run's folder, for as long as this one or its successor is alive.

    A folder of other files is refused.
    """
    run.mkdir(parents=True, exist_ok=True)
    if not (run / record.FILE).exists() and not started(run):
        foreign = sorted(path.name for path in run.iterdir() if not _BEFORE.fullmatch(path.name))
        if foreign:
            raise UserError(f"{run}: contains {foreign[0]}, which training did not create; choose another folder")
    lock = (run / "lock").open("w")
    try:
        # A lock of the process, not of the file: it survives exec, and no worker that outlives a kill holds it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            f"{run}: another process trains in this folder; wait for its end, or choose another --run"
        ) from None
    os.set_inheritable(lock.fileno(), True)
    _locks.append(lock)


def started(run: Path) -> bool:
    """Whether a run has left a model or its results here; one that failed before has no claim."""
    return any(path for left in ("checkpoint*", "average*.pt", "eval/*.json") for path in run.glob(left))


def claim(run: Path, this: Mapping[str, str], command: str, data: Path) -> None:
    """Record the run that owns this folder and keep its preparation, or refuse another run's, or data that differ."""
    path = run / record.FILE
    before = record.read(path) if path.exists() and started(run) else None
    if started(run) and not before:
        raise UserError(f"{run} holds checkpoints or scores that scripts/train.sh did not make; choose another --run")
    kept = Preparation.kept_by(run) if before else None
    owner = before["identity"] if before else this
    changed = [name for name in sorted(owner.keys() | this.keys()) if differ(owner.get(name), this.get(name))]
    if kept and changed in ([], ["data"]):
        kept.require_same(Preparation.at(data), run)  # which names the first difference
    if changed:
        raise UserError(
            f"{run} belongs to another run; choose another --run\n"
            + "\n".join(f"  {name}: there {said(owner.get(name))}, now {said(this.get(name))}" for name in changed)
        )
    first, starts = (before.get("command", command), before.get("starts", [])) if before else (command, [])
    write_json(path, {"identity": this, "command": first, "starts": starts})
    if not kept:
        Preparation.at(data).keep(run)


def record_start(run: Path, flags: Flags, launch: Launch, done: int, command: str) -> None:
    """Add to run.json that training starts, or goes on after `done` updates: when, by which command, code and flags.

    A finished run that goes on has no model recorded until its new end.
    """
    machine = {"user-dir", "save-dir", "tensorboard-logdir", "wandb-project"}
    start = {
        "command": command,
        "updates": done,
        **provenance(on_cpu=not launch.gpus),
        "processes": launch.processes,
        "flags": {name: " ".join(values) for name, values in flags.items() if name not in machine},
    }
    before = record.read(run / record.FILE)
    starts = before.get("starts", [])
    if done and starts:
        say_what_differs(starts[-1]["flags"], start["flags"])
    write_json(run / record.FILE, {**before, "starts": [*starts, start]})
    Run(run).forget_model()


def say_what_differs(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Print a note for each flag of fairseq-train that a run goes on without, with, or with another value."""
    for name in sorted(before.keys() | now.keys()):
        if differ(before.get(name), now.get(name)):
            was, is_now = (said(flags.get(name)) for flags in (before, now))
            say(f"note: --{name} is {is_now} from here on; it was {was} when this run last started")


def last_flags(run: Path) -> dict[str, str] | None:
    """The flags of a run's last start; None before the first, and where version 0.1.0 made the run."""
    starts = record.read(run / record.FILE).get("starts")
    return starts[-1]["flags"] if starts else None


def require_same_metric(run: Path, flags: Flags) -> None:
    """Refuse another metric of the best checkpoint than before: fairseq would compare the numbers of the two."""
    earlier, name = last_flags(run), "best-checkpoint-metric"
    if not started(run) or earlier is None or "reset-meters" in flags:
        return
    before, now = earlier.get(name, "loss"), flags.get(name, ["loss"])[0]
    if before != now:
        raise UserError(
            f"{run}: its best checkpoint was chosen by {before}, and would now be by {now} (--eval-bleu chooses by "
            "bleu). Choose another --run, or add --reset-meters to forget the best so far"
        )


#: Flags that say when to stop and what to save, and the seed, which is part of a run's identity.
_STOPPING = re.compile(
    r"max-(update|epoch)|patience|stop-.*|(keep|save|validate)-.*|no-(epoch-checkpoints|last-checkpoints|save.*)|seed"
)


def differ(value: str | None, other: str | None) -> bool:
    """Whether two values of a flag, None where it is not given, mean different things."""
    return value != other and (value is None or other is None or plain(value) != plain(other))


def refuse_other_flags(run: Path, flags: Flags, without: Iterable[str] = ()) -> None:
    """Refuse flags of the command line by which a finished run was not trained: they would have no effect.

    Args:
        run: its folder.
        flags: those of the command line.
        without: what --without names, which must not have been among them.
    """
    before = last_flags(run)
    if before is None:
        return
    launch = NOT_LEARNING.difference(PRECISIONS, ("max-tokens", "update-freq"))
    others = [
        f"{' '.join([f'--{name}', *values])} (it was {said(before.get(name))})"
        for name, values in flags.items()
        if name not in launch and not _STOPPING.fullmatch(name) and differ(before.get(name), " ".join(values))
    ]
    left_out = (name.removeprefix("--") for name in without)
    others += [f"--without {name} (it was {said(before[name])})" for name in left_out if name in before]
    if others:
        raise UserError(
            f"{run}: this run is finished, and was not trained with {', '.join(others)}; to train with it choose "
            "another --run"
        )


def mend(run: Path) -> dict[str, Any] | None:
    """Let checkpoint_last.pt be the newest checkpoint that loads, and return its contents; None where a run starts.

    Damaged ones are set aside. A whole checkpoint that asks for more than weights and settings is an error, and stays
    where it is. So does one that the machine cannot read.
    """
    for path in [*run.glob("*.pt.tmp"), *run.glob(".*.pt.*.tmp")]:  # fairseq's, and replacing()'s
        path.unlink()
    found = [(updates_of(path), path.name == LAST, path) for path in run.glob("checkpoint*.pt")]
    # Those that do not tell their updates come first, and are set aside where they are damaged.
    for *_, path in sorted(found, key=lambda one: (one[0] < 0, one), reverse=True):
        try:
            state = load(path)
        except DamagedError as error:
            aside = path.with_name(path.name + ".damaged")
            path.replace(aside)
            say(f"train: warning: {error}\ntrain: warning: it is set aside as {aside}")
            continue
        if "optimizer_history" in state and "last_optimizer_state" in state:
            break
        say(f"train: warning: {path}: has no optimizer state, training cannot go on from it")
    else:
        if started(run):
            raise UserError(
                f"{run}: training can go on from none of its checkpoints; scripts/evaluate.sh can score those that are "
                "whole. To start again from nothing, remove the folder"
            )
        return None
    if path.name != LAST:
        extra = state["extra_state"]
        is_best = extra.get("best") == extra.get("val_loss") is not None
        for name in [LAST, *([BEST] if is_best and path.name != BEST else [])]:
            if (run / name).is_symlink():  # to another checkpoint, which stays as it is
                (run / name).unlink()
            with replacing(run / name) as temporary:
                shutil.copyfile(path, temporary)
        say(f"train: going on from {path.name}; {LAST} is older or missing")
    return state


def whole_last(run: Path) -> dict[str, Any] | None:
    """The contents of checkpoint_last.pt; None where it is not there, or where another machine has yet to mend it."""
    try:
        return load(run / LAST) if (run / LAST).exists() else None
    except DamagedError:
        return None


def updates(state: Mapping[str, Any]) -> int:
    """How many updates a checkpoint has seen."""
    return state["optimizer_history"][-1]["num_updates"]


def finished(state: Mapping[str, Any] | None, flags: Flags) -> str | None:
    """Why a run with this last checkpoint has nothing left to do, or None."""
    if state is None:
        return None
    most, epochs, patience = (int(flags.get(name, ["0"])[0]) for name in ("max-update", "max-epoch", "patience"))
    if 0 < most <= updates(state):
        return f"{updates(state):,} updates, --max-update is {most:,}"
    extra = state["extra_state"]
    if 0 < epochs < extra["train_iterator"]["epoch"]:
        return f"--max-epoch is {epochs}"
    runs = extra.get("early_stopping", {}).get("num_runs") or 0
    if 0 < patience <= runs:
        return f"{runs:.0f} validations without improvement, --patience is {patience}"
    return None


def settle_model(run: Path) -> Path:
    """Record the model of a run whose training has ended: an average, made here, or a single checkpoint."""
    checkpoints = Run(run).last(AVERAGED)
    if checkpoints:
        model = run / f"average{len(checkpoints)}.pt"
        save(average(checkpoints), model)
    else:
        model = run / (BEST if (run / BEST).exists() else LAST)
    Run(run).record_model(model.name)
    return model


def next_command(data: Path, run: Path) -> str:
    """The command to type after a training: it scores the run's model on the test, else on the validation set."""
    command = [str(REPO / "scripts/evaluate.sh"), "--data", str(data.absolute()), "--run", str(run.absolute())]
    if not any((data / "raw").glob("test.*")):
        command += ["--subset", "valid"]
    # Paths below the repository are shortened only where the command is typed there.
    return portable(command) if Path.cwd() == REPO else shlex.join(command)
