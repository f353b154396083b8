"""Attach recompute to a layer without wrapping it, and take it away without a trace."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_ckpt.recompute.arguments import Handle, Keep
from lightning_ckpt.recompute.fingerprint import Verify
from lightning_ckpt.recompute.foreign import is_switched_on, runs_inside_checkpoint
from lightning_ckpt.recompute.frame import Frame, ReplayError, is_out_of_memory, is_replaying
from lightning_ckpt.recompute.inspection import FILLS_LATE, IS_CHECKPOINTED, inspect_call
from lightning_ckpt.recompute.inventory import Inventory
from lightning_ckpt.recompute.policy import resolve_policy

Silencer = Callable[[], AbstractContextManager[Any]]


class Recompute:
    """Instance-level `forward` of a layer.

    A module-level class that holds its layer: it deep-copies and pickles together with the layer, so an EMA copy runs
    its own weights, and it stays clear of `__call__`, so that hooks of the layer are outside of what is recomputed.

    Attributes:
        layer: the layer it is attached to.
        name: the layer's qualified name.
        verify: which calls are verified by fingerprints.
        silencers: make contexts that are entered around every replay.
        policy: operators whose results are kept for the replay; empty for none.
        recomputes: whether the layer is recomputed; if not, what it saves is kept.
        kept_operators: those of which a result was kept in the first calls.
        keep: looks after what is kept until backward, on the host, say: the activations among the inputs of a layer
            that is recomputed, else everything it saves. None leaves it where it is.
        called: whether the layer has run with gradients on.
        compiled: whether it has done so in compiled code.
        findings: what its first calls showed that a user should know (see `inspection`).
        given_up: names of what the layer can reach that cannot be photographed: what is too large, and iterators.
        taken_over: modules whose checkpointing by Hugging Face is off while this is attached.
        previous: a forward that somebody else put on the instance before; it runs inside and comes back afterwards.
        lock: held while the layer runs, for layers that are called from several threads.
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        verify: Verify,
        silencers: Iterable[Silencer],
        policy: frozenset[OpOverload],
    ) -> None:
        self.layer = layer
        self.name = name
        self.verify: Verify = verify
        self.silencers = list(silencers)
        self.policy = policy
        self.recomputes = True
        self.kept_operators: set[OpOverload] = set()
        self.keep: Keep | None = None
        self.called = False
        self.compiled = False
        self.findings: set[str] = set()
        self.given_up: dict[str, None] = {}
        self.lock = threading.RLock()
        self._inventory: Inventory | None = None
        self._latest: weakref.ref[Frame] | None = None
        self.previous = layer.__dict__.get("forward")
        self.taken_over = [module for module in layer.modules() if is_switched_on(module)]
        for module in self.taken_over:
            setattr(module, "gradient_checkpointing", False)

    @property
    def unsaved_bytes(self) -> int:
        """Bytes that autograd would keep of the latest call in addition, as far as its graph is there and watched."""
        frame = None if self._latest is None else self._latest()
        return 0 if frame is None else frame.unsaved_bytes()

    def __getstate__(self) -> dict[str, Any]:
        # Operators cannot be pickled, their names can.
        names = [str(operator) for operator in self.policy]
        gone: dict[str, Any] = {
            "lock": None,
            "_inventory": None,
            "_latest": None,
            "silencers": [],
            "keep": None,
            "kept_operators": set(),
        }
        return {**self.__dict__, **gone, "policy": names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state["policy"]
        policy = resolve_policy(names) if names else frozenset()
        self.__dict__.update(state, lock=threading.RLock(), policy=policy)

    @property
    def __globals__(self) -> dict[str, Any]:
        """Only `torch.jit.script` asks for it, which cannot compile this."""
        raise AttributeError(
            f"Layer {self.name!r} is recomputed until the end of `fit`, and `torch.jit.script` cannot compile that. "
            "Call it after `fit`, or use `torch.jit.trace` or `torch.export.export`."
        )

    @property
    def inventory(self) -> Inventory:
        """What the layer owns, found in the first call."""
        if self._inventory is None:
            self._inventory = Inventory(self.layer)
        return self._inventory

    @property
    def fills_late(self) -> bool:
        """Whether the layer holds an operator that fills a tensor after autograd saved it."""
        return FILLS_LATE in self.findings or self.inventory.names_late_operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.jit.is_tracing() or torch.compiler.is_exporting():
            return self.run(*args, **kwargs)
        if not self.recomputes:
            return self._kept(args, kwargs)
        if torch.compiler.is_compiling():
            self.called = self.compiled = True
            if getattr(type(self.layer).forward, "_torchdynamo_disable", False):
                return self._outside_of_the_graph(args, kwargs)
            # PyTorch's own checkpoint is what the compiler can trace. Where it cannot (the layer changes its own
            # state), it would run that checkpoint eagerly, without a word and without our care.
            with torch._dynamo.error_on_graph_break(True):
                if self.policy:
                    contexts = _contexts_of(self.policy)
                    return checkpoint(self.run, *args, use_reentrant=False, context_fn=contexts, **kwargs)
                return checkpoint(self.run, *args, use_reentrant=False, **kwargs)
        if not is_replaying() and runs_inside_checkpoint():
            self.findings.add(IS_CHECKPOINTED)
            return self.run(*args, **kwargs)
        return self._recomputed(args, kwargs)

    def _kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.called = True
        if torch.compiler.is_compiling():
            self.compiled = True
        elif self.keep is not None and not is_replaying():
            with saved_tensors_hooks(self.keep, _unpack):
                return self.run(*args, **kwargs)
        return self.run(*args, **kwargs)

    def _recomputed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inventory is None and _is_lazy(self.layer):
            return self.run(*args, **kwargs)  # it takes its shapes in this call
        with self.lock:
            with self._named():
                frame = Frame(self, args, kwargs)
                self._latest = weakref.ref(frame)
                learning = frame.is_learning
            output = frame.forward(args, kwargs)
            with self._named():
                frame.learn()
            self.called = self.called or frame.saves
            self.given_up |= dict.fromkeys(frame.given_up)
            if learning:
                self.findings |= inspect_call(frame.arguments.tensors, args, kwargs, output)
                if frame.results is not None:
                    self.kept_operators |= frame.results.kept_operators()
                if self.fills_late:
                    frame.forget_fingerprints()
            if self.keep is not None:
                with self._named():
                    frame.arguments.hand_over(self.keep)
        return output

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Whatever goes wrong in the bookkeeping names the layer."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ReplayError) or is_out_of_memory(error):
                raise
            raise ReplayError(
                f"Recomputed layer {self.name!r} could not be photographed: {type(error).__name__}({error}). Leave it "
                "out with `layers=` or `check_fn=`, and please report this."
            ) from error

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _outside_of_the_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._recomputed(args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def detach(self) -> None:
        """Leave the layer as it was before."""
        del self.layer.__dict__["forward"]
        if self.previous is not None:
            self.layer.forward = self.previous
        for module in self.taken_over:
            setattr(module, "gradient_checkpointing", True)


@functools.cache
def _contexts_of(policy: frozenset[OpOverload]) -> Callable[[], Any]:
    """One object for all layers of a policy: the compiler takes each for another one, and compiles again."""
    return functools.partial(create_selective_checkpoint_contexts, list(policy))


def _unpack(handle: Handle) -> Tensor:
    return handle.tensor()


def _is_lazy(layer: nn.Module) -> bool:
    return any(isinstance(item, UninitializedTensorMixin) for item in (*layer.parameters(), *layer.buffers()))


def attach(
    layer: nn.Module,
    name: str,
    verify: Verify = "sample",
    silencers: Iterable[Silencer] = (),
    policy: frozenset[OpOverload] = frozenset(),
) -> Recompute:
    """Recompute `layer` in backward from now on, until `detach`.

    Args:
        layer: any module with a forward. It keeps its class, its parameters and their names, and its hooks. Hugging
            Face's own checkpointing of it, or of parts of it, is switched off until then.
        name: its qualified name, for messages.
        verify: which calls compare what the replay saves with what forward saved, by fingerprints: the first of every
            mode and one in 128 (`"sample"`), all of them (`"always"`) or none (`"off"`). Default: `"sample"`.
        silencers: functions that make a context; it is entered around every replay, to keep it from being noticed.
            Default: none.
        policy: operators whose results are kept, so that the replay does not compute them again (see
            `recompute.policy.resolve_policy`). Default: none.

    Returns:
        What was attached.

    Raises:
        ValueError: the layer has recompute attached already.

    Example::

        from lightning_ckpt.recompute import attach, detach

        attach(model.blocks[0], "blocks.0")
        model(x).sum().backward()   # blocks.0 ran twice
        detach(model.blocks[0])
    """
    current = attached(layer)
    if current is not None:
        raise ValueError(f"Layer {name!r} is recomputed already, attached as {current.name!r}. Detach it first.")
    recompute = Recompute(layer, name, verify, silencers, policy)
    layer.forward = recompute
    return recompute


def attached(layer: nn.Module) -> Recompute | None:
    """What is attached to `layer`, or None."""
    forward = layer.__dict__.get("forward")
    return forward if isinstance(forward, Recompute) else None


def detach(layer: nn.Module) -> None:
    """Leave `layer` as it was before `attach`; one without recompute is no error."""
    current = attached(layer)
    if current is not None:
        current.detach()
