"""Checkpoints in and out: safetensors, the hub, config translation, tensor rules with inverses."""
