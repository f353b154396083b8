"""The page on scaling up: its configurations, run on two processes as a user runs them, and its arithmetic."""

import csv
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import attach
from tests.distributed import launch
from tests.support import Training, blocks, trainer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scaling.md").read_text()
PROSE = " ".join(PAGE.split())
STEPS = 4
LAYERS = 4
SMALL = {"--model.width": 32, "--model.heads": 2, "--model.depth": LAYERS, "--data.length": 64, "--data.batch_size": 4}


def train(config, folder, *flags):
    """Run `train.py fit` with a file of examples/ in `folder`: what it printed, with no process left behind."""
    settings = {**SMALL, "--trainer.max_steps": STEPS, "--trainer.callbacks.every_n_train_steps": STEPS}
    arguments = [
        *(ROOT / "examples" / "train.py", "fit", "--config", ROOT / "examples" / config),
        *(part for setting in settings.items() for part in setting),
        *("--trainer.enable_progress_bar", "false", *flags),
    ]
    done = launch.run(list(map(str, arguments)), folder, seconds=600, cwd=folder)
    assert done.code == 0, done.stdout + done.stderr
    assert done.left_behind == 0
    return done.stdout + done.stderr


def read_metrics(folder):
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recomputed"), [("ddp", LAYERS // 2), ("fsdp2", LAYERS)])
def test_configuration_trains_two_processes_as_the_plain_run(name, recomputed, tmp_path):
    pytest.importorskip("transformers")
    output = train(f"{name}.yaml", tmp_path)
    plain_output = train(f"{name}.yaml", tmp_path, "--ckpt.enabled", "false")
    got, plain = (read_metrics(tmp_path / "logs" / f"{name}-csv" / f"version_{version}") for version in range(2))

    assert "Starting with 2 processes" in output
    assert output.count("recomputes in backward") == 1  # said by one rank
    assert f"{recomputed} of {LAYERS} " in output
    assert "no layer is recomputed" in plain_output

    # As text: equal to the last bit.
    assert len(got["loss"]) == STEPS
    assert len(set(got["loss"])) == STEPS
    assert got["loss"] == plain["loss"]
    assert all(float(value) > 0 for value in got["time/recompute_ms"])
    assert all(float(value) == 0 for value in plain["time/recompute_ms"])
    for less, more in zip(got["memory/saved_MiB"], plain["memory/saved_MiB"], strict=True):
        assert float(less) < float(more) * (0.7 if name == "ddp" else 0.4)

    (checkpoint,) = (tmp_path / "logs" / name / "version_0" / "checkpoints").iterdir()
    assert checkpoint.name == f"epoch=0-step={STEPS}.ckpt"
    if name == "ddp":
        assert checkpoint.is_file()
    else:
        assert {file.name for file in checkpoint.iterdir()} >= {"__0_0.distcp", "__1_0.distcp"}
        assert "the inputs of recomputed layers" not in output  # there is no accelerator
        assert "nothing is moved" in output


def count_collectives(rank, folder):
    """On each rank: recompute causes no all-gather and no reduction."""
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", rank=rank, world_size=2, store=store)
    mesh = init_device_mesh("cpu", (2,))
    counts = {}
    for reshard in (True, False):
        for recomputed in (True, False):
            model = blocks(3)
            layers = list(model[1:])
            for layer in layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh)
            attachments = [attach(layer, str(i)) for i, layer in enumerate(layers)] if recomputed else []
            with CommDebugMode() as collectives:
                model(torch.randn(2, 8)).sum().backward()
            assert all(attachment.called for attachment in attachments)
            counts[reshard, recomputed] = {str(name): n for name, n in collectives.get_comm_counts().items()}
    distributed.destroy_process_group()
    gathered = {key: next(n for name, n in found.items() if "allgather" in name) for key, found in counts.items()}
    # The root is gathered once, and so is each of three layers, or twice.
    assert gathered == {(True, True): 7, (True, False): 7, (False, True): 4, (False, False): 4}
    assert counts[True, True] == counts[True, False]
    assert counts[False, True] == counts[False, False]


@pytest.mark.slow
def test_recompute_causes_no_collective(tmp_path):
    multiprocessing.spawn(count_collectives, (str(tmp_path),), nprocs=2)


WIDTH, LENGTH, VOCABULARY = 128, 128, 256
TOKENS = 2 * LENGTH
COMMON = {"vocab_size": VOCABULARY, "hidden_size": WIDTH}


def neox(depth, vocabulary=VOCABULARY):
    shape = {**COMMON, "vocab_size": vocabulary, "intermediate_size": 4 * WIDTH}
    transformers = pytest.importorskip("transformers")  # not above: spawned processes do without
    config = transformers.GPTNeoXConfig(**shape, num_attention_heads=2, num_hidden_layers=depth)
    return transformers.GPTNeoXForCausalLM(config)


def llama(depth, width, heads, key_heads):
    shape = {**COMMON, "intermediate_size": width, "num_hidden_layers": depth}
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**shape, num_attention_heads=heads, num_key_value_heads=key_heads)
    return transformers.LlamaForCausalLM(config)


BLOCKS = {
    "GPT-NeoX, MLP of 4 times the width": neox,
    "Llama, MLP of 2.7 times the width": lambda depth: llama(depth, 344, 2, 2),
    "Llama, MLP of 3.5 times the width, 4 heads to a key": lambda depth: llama(depth, 448, 4, 1),
}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def measure(model, precision, folder, steps=1, **options):
    """What the monitor says of a run, and the bytes of parameters, gradients and AdamW after it."""
    module = Training(model, lambda model, batch: model(batch, labels=batch, use_cache=False).loss, torch.optim.AdamW)
    callback = ActivationCheckpointing(**options)
    loop = trainer([callback], precision=precision, logger=CSVLogger(folder))
    data = torch.randint(0, model.config.vocab_size, (2 * steps, LENGTH))
    loop.fit(module, DataLoader(data, batch_size=2))
    parameters = list(module.parameters())
    moments = [value for state in loop.optimizers[0].state.values() for value in state.values() if value.dim()]
    states = [
        sum(tensor.nbytes for tensor in tensors) / sum(parameter.numel() for parameter in parameters)
        for tensors in (parameters, [parameter.grad for parameter in parameters], moments)
    ]
    return callback.summary(), states


def cells(table_head):
    """The table of the page whose first line begins so: the rows, by their first cell."""
    lines = PAGE.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(table_head))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        rows.setdefault(first, []).append(others)
    return rows


def program():
    """The page's program, executed."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(code, names)
    return names


@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_take_the_bytes_of_the_page(precision, tmp_path):
    _, states = measure(neox(1), precision, tmp_path)
    (row,) = cells("| `precision`")[precision]
    assert list(map(int, row)) == [*states, sum(states)]
    assert program()["BYTES"][precision][:3] == tuple(states)


@pytest.mark.slow
@pytest.mark.parametrize("column", range(3), ids=PRECISIONS)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_keep_the_bytes_of_the_page(block, column, tmp_path):
    (row,) = cells("| block")[block]
    if not row[column]:
        pytest.skip("not measured")
    precision = PRECISIONS[column]
    model = BLOCKS[block]
    one, two = (model(depth) for depth in (1, 2))
    weights = sum(p.numel() for p in two.parameters()) - sum(p.numel() for p in one.parameters())
    casts = program()["BYTES"][precision][-1] * weights  # which the page tells apart
    kept, inputs = (
        measure(two, precision, tmp_path, enabled=enabled)[0].saved_bytes
        - measure(one, precision, tmp_path, enabled=enabled)[0].saved_bytes
        for enabled in (False, True)
    )
    unit = TOKENS * WIDTH
    assert (kept - casts) / unit == pytest.approx(int(row[column]), rel=0.015)
    assert inputs / unit == int(cells("| block")["any, recomputed: its input"][0][column])


@pytest.mark.slow
def test_the_loss_takes_the_bytes_of_the_page(tmp_path):
    peaks, counts = [], []
    for vocabulary in (8192, 16384):
        model = neox(1, vocabulary)
        counts.append(sum(p.numel() for p in model.parameters()))
        peaks.append(measure(model, "32-true", tmp_path, steps=2)[0].peak_bytes)
    # When backward reaches the loss, there are no gradients of the weights yet.
    states = 12 * (counts[1] - counts[0])
    per_entry = (peaks[1] - peaks[0] - states) / (TOKENS * 8192)
    assert per_entry == pytest.approx(12, rel=0.01)
    assert "12 bytes per token and entry of the vocabulary" in PROSE


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("every_n_layers", [None, 1])
def test_the_sum_is_near_what_is_measured(precision, every_n_layers, tmp_path):
    treatment = {"every_n_layers": every_n_layers} if every_n_layers else {"enabled": False}
    model = neox(4)
    got = measure(model, precision, tmp_path, steps=2, **treatment)[0].peak_bytes
    states = 16 * sum(parameter.numel() for parameter in model.parameters())
    formula = program()["gigabytes"](WIDTH, 4, VOCABULARY, TOKENS, precision, every_n_layers=every_n_layers)
    low, high = map(float, re.search(r"beyond the states was ([\d.]+) to ([\d.]+) times the formula", PROSE).groups())
    assert low < (got - states) / 1e9 / (formula["sum"] - formula["states"]) < high


def test_the_rows_of_the_page_are_what_its_program_says():
    gigabytes = program()["gigabytes"]
    shapes = {name: list(map(int, shape)) for name, (shape,) in cells("| model | hidden").items()}
    rows = [(name, *row) for name, found in cells("| model | devices").items() for row in found]
    assert len(rows) == 12
    for name, devices, precision, treatment, *figures, fits in rows:
        count, size = map(int, re.fullmatch(r"(\d+) x (\d+) GB", devices).groups())
        every, _, offload = treatment.partition(", ")
        want = gigabytes(*shapes[name], precision, count, None if every == "none" else int(every), offload == "offload")
        assert figures == [f"{value:.1f}" for value in want.values()], name
        assert fits == ("yes" if want["sum"] <= 0.9 * size else "no"), name
