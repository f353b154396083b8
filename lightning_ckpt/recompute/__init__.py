"""Recompute one layer in backward instead of keeping its activations: plain PyTorch, no Lightning.

`attach` gives a layer an instance-level `forward`; `detach` takes it away. In between, every call with gradients on is
a `Frame`: the layer runs, nothing that autograd saves is kept but the arguments, and the first saved tensor that
backward asks for makes the frame run the layer again (the *replay*).
"""

from lightning_ckpt.recompute.attach import Recompute, attach, attached, detach
from lightning_ckpt.recompute.frame import ReplayError, is_replaying

__all__ = ["Recompute", "ReplayError", "attach", "attached", "detach", "is_replaying"]
