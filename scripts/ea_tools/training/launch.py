"""The place of a training's processes: GPUs and machines, their precision, their launcher."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ea_artifacts.command import UserError, say
from ea_tools.training import products

PORT = 29500  # by default, of machine 0


@dataclass(frozen=True)
class Launch:
    """The place of the processes: `gpus` (0 is the CPU) on each of `nodes` machines, this one being number `rank`."""

    gpus: int
    capability: tuple[int, int] | None = None  # of the least of the GPUs
    nodes: int = 1
    rank: int = 0
    host: str = "localhost"
    port: int = PORT

    @classmethod
    def of(cls, args: argparse.Namespace) -> Launch:
        """The command line's values, which have SLURM's for defaults, else this machine's."""
        there, capability = (0, None) if args.gpus == 0 else gpus()
        wanted = there if args.gpus is None else args.gpus
        if wanted > there and not args.dry_run:
            raise UserError(f"--gpus {wanted}: this machine has {there}; give at most {there}")
        nodes, rank = args.nodes, args.node_rank
        if nodes is None and (rank is not None or args.master):
            raise UserError("--node-rank and --master need --nodes, the number of machines")
        if nodes in (None, 1):
            return cls(wanted, capability)
        master = args.master or _slurm_master()
        if rank is None or master is None:
            raise UserError(
                f"{nodes} machines need --node-rank and --master HOST[:PORT], which only srun and scontrol would "
                "give; --nodes 1 trains on this one alone"
            )
        if rank >= nodes:
            raise UserError(f"--node-rank {rank}: with --nodes {nodes} it is 0 to {nodes - 1}")
        return cls(wanted, capability, nodes, rank, *master)

    @property
    def processes(self) -> int:
        """How many processes train, on all machines together."""
        return max(self.gpus, 1) * self.nodes

    def __str__(self) -> str:
        what = f"{self.gpus} GPU" if self.gpus else "CPU"
        return what if self.nodes == 1 else f"{self.nodes} machines x {what}"


#: Device files of GPU drivers: NVIDIA's, AMD's, and that of Linux in Windows.
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def gpus() -> tuple[int, tuple[int, int] | None]:
    """The number of GPUs, and their least compute capability.

    PyTorch is only asked where there is a driver: its import takes seconds.
    """
    if not any(Path(driver).exists() for driver in DRIVERS):
        return 0, None
    import torch

    count = torch.cuda.device_count()
    return count, min((torch.cuda.get_device_capability(i) for i in range(count)), default=None)


def host_and_port(text: str) -> tuple[str, int]:
    """An argparse type: HOST[:PORT]."""
    host, _, port = text.partition(":")
    return host, int(port or PORT)


def _slurm_master() -> tuple[str, int] | None:
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    if not nodelist or not shutil.which("scontrol"):  # containers lack it
        return None
    command = ["scontrol", "show", "hostnames", nodelist]
    hosts = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return (hosts[0], PORT) if hosts else None


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
            say("precision: fp32; this CPU has units for bfloat16, try --precision bf16 (docs/performance.md)")
        return "fp32"
    if not launch.capability:  # --dry-run for another machine
        return "fp32"
    precision = "bf16" if launch.capability >= (8, 0) else "fp16" if launch.capability >= (7, 0) else "fp32"
    say(f"precision: {precision}, by the GPU's compute capability, {'.'.join(map(str, launch.capability))}")
    return precision


def distribution(launch: Launch) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """fairseq's distributed flags, the words that start Python, and the environment.

    One machine: fairseq starts a process for each GPU. Several: torchrun does, on each machine. Several without GPUs:
    one process on each, for which fairseq needs every flag.
    """
    python = [sys.executable, "-u", "-P"]  # -P: it imports nothing that lies beside fairseq_train.py
    # A cluster or a container may set these. fairseq would take the number of processes from them.
    told = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
    if launch.nodes == 1:  # and from these its port, the same one for all trainings in a job
        told |= {"SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID"}
    inherited = os.environ.items()
    environment = {name: value for name, value in inherited if not (name.endswith("NODELIST") or name in told)}
    flags: dict[str, Any] = {"distributed-world-size": launch.processes}
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
