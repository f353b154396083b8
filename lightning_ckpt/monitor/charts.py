"""Charts of TensorBoard that lay the curves of memory, and those of time, over each other."""

import os
from pathlib import Path
from weakref import WeakSet

from lightning.pytorch.loggers import Logger, TensorBoardLogger

# More lines than two per run are hard to tell apart.
_LAYOUT = {
    "lightning_ckpt": {
        "memory (MiB)": ["Multiline", [r"memory/(saved|peak)_MiB$"]],
        "time (ms)": ["Multiline", [r"time/(step|recompute)_ms$"]],
    }
}
_TAG = "custom_scalars__config__"
_SMALL = 2**20  # bytes of an event file that are read through without a second thought
_done: WeakSet[Logger] = WeakSet()


def add_charts(logger: Logger) -> None:
    """Give a TensorBoard logger its charts, once, unless the user has laid out charts before."""
    if isinstance(logger, TensorBoardLogger) and logger not in _done:
        _done.add(logger)
        if not _has_layout(logger):
            logger.experiment.add_custom_scalars(_LAYOUT)


def _has_layout(logger: TensorBoardLogger) -> bool:
    """Whether this process has written a layout: a writer does not tell, but its file does."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:  # a logger can also write by tensorboardX
        return False
    logger.experiment.flush()
    files = Path(logger.log_dir).glob(f"events.out.tfevents.*.{os.getpid()}.*")
    return any(
        value.tag == _TAG
        for path in files
        if path.stat().st_size < _SMALL
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    )
