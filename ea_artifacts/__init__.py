"""Files on a disk: prepared data, checkpoints and runs, without fairseq; PyTorch only where tensors are read."""
