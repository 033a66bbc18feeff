"""scripts/train.sh on two machines without GPUs: two network namespaces, joined by a virtual cable."""

import subprocess

import pytest
import torch
from helpers.toy import ENVIRONMENT, TINY, done, tool

from ea_artifacts.checkpoints import load

# Run in namespaces of its own (unshare -rnm): this one is host 1, "two" is host 2. "$@" is the command less its rank.
# No name server can be reached from here, and none is asked.
TWO_HOSTS = """
set -e
mount -t tmpfs tmpfs /run
mount --bind /dev/null /etc/resolv.conf
ip netns add two
ip link add cable type veth peer name cable netns two
ip addr add 10.77.0.1/24 dev cable
ip link set cable up
ip link set lo up
ip -n two addr add 10.77.0.2/24 dev cable
ip -n two link set cable up
ip -n two link set lo up
export GLOO_SOCKET_IFNAME=cable
ip netns exec two "$@" --node-rank 1 &
"$@" --node-rank 0
wait $!
"""


@pytest.mark.slow
def test_two_hosts_train_as_one_with_twice_the_accumulation(data, tmp_path):
    namespaces = ["unshare", "-rnm", "sh", "-c"]
    if subprocess.run([*namespaces, "mount -t tmpfs tmpfs /run && ip netns add two"], check=False).returncode:
        pytest.skip("needs unshare and ip netns")
    flags = [*TINY, "--data", data, "--max-tokens", 256, "--max-epoch", 2]
    flags += ["--num-workers", 0, "--gpus", 0, "--dropout", 0, "--no-tensorboard"]
    flags += ["--eval-bleu-args", '{"beam": 1, "max_len_b": 5}']
    command = [*tool("training.train"), "sample", "ea_transformer_lite", *flags]
    command += ["--update-freq", 1, "--run", tmp_path / "two", "--nodes", 2, "--master", "10.77.0.1:29511"]
    both = subprocess.run(
        [*namespaces, TWO_HOSTS, "sh", *map(str, command)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert both.returncode == 0, both.stderr[-3000:]
    assert "2 machines x CPU x 1 accumulation" in both.stderr or "effective batch: 512 tokens" in both.stderr
    done("training.train", "sample", "ea_transformer_lite", *flags, "--update-freq", 2, "--run", tmp_path / "one")
    two, one = (load(tmp_path / name / "checkpoint_last.pt") for name in ("two", "one"))
    assert two["optimizer_history"][-1]["num_updates"] == one["optimizer_history"][-1]["num_updates"] > 4
    assert two["cfg"]["distributed_training"]["distributed_world_size"] == 2
    for key, weight in one["model"].items():
        torch.testing.assert_close(two["model"][key], weight, rtol=1e-4, atol=1e-5, msg=key)
    # One log, one writer: the second host keeps quiet.
    assert (tmp_path / "two" / "train.log").read_text().count("| valid | epoch 002") == 1
