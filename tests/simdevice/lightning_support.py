"""Lightning on the simulated device."""

from typing import Any

import backend  # noqa: F401  (registers the device)
import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy


class SimAccelerator(Accelerator):
    """One simulated device."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != "sim":
            raise ValueError(f"the device should be sim and is {device}")

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats())

    def teardown(self) -> None:
        torch.accelerator.empty_cache()

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("sim", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"


def precision_plugin(precision: str) -> Precision:
    """Lightning would take "cuda" for the device of mixed precision, whatever the accelerator."""
    if precision in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(precision, device="sim")
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision)
    return Precision()


def make_trainer(precision: str = "32-true", **settings: Any) -> pl.Trainer:
    """A Trainer on the simulated device: quiet, and without files unless the settings ask for some."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return pl.Trainer(
        accelerator=SimAccelerator(),
        strategy=SingleDeviceStrategy(device=torch.device("sim:0")),
        devices=1,
        plugins=[precision_plugin(precision), *settings.pop("plugins", [])],
        **{**quiet, **settings},
    )
