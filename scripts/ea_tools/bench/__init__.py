"""Benchmarks of attention, training and decoding, ours beside fairseq's own."""
