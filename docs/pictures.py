"""Make the pictures of the README from the logs of `examples/demo.py`, and check what TensorBoard shows of them.

    python docs/pictures.py               # trains the demo first, with further flags for it: three minutes
    python docs/pictures.py --logs logs   # takes what `make demo` has left in logs/

It draws docs/demo.png, opens TensorBoard in a headless Chromium, and photographs its sections "memory" and "time" to
docs/tensorboard.png and its overlay charts to docs/tensorboard-overlay.png. Every line of every chart must have one
point per optimizer step; else nothing is written, and an error says what is wrong. It needs Chromium and its driver (on
Debian: `apt install chromium chromium-driver`), and `pip install 'lightning_ckpt[examples,pictures]'`.
"""

import argparse
import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from lightning_ckpt.report import ReportError, draw, read_runs

DOCS = Path(__file__).parent
DEMO = DOCS.parent / "examples" / "demo.py"
RUNS = ["every_n_layers=1", "every_n_layers=2", "plain"]
SECTIONS = ["memory", "time"]
PATIENCE = 60  # seconds, for everything that is waited for

# Charts outside of the window are never drawn: it is very tall, and pictures are cut out of it.
WINDOW_HEIGHT = 6000
WIDTH_OF_SECTIONS, WIDTH_OF_OVERLAYS = 1500, 1150
CHROMIUM_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-quic", "--no-proxy-server"),
]
# Values as they were logged, on light ground, and nothing that changes once it is drawn.
TENSORBOARD_SETTINGS = {
    "_tb_global_settings": {
        "scalarSmoothing": 0,
        "ignoreOutliers": False,
        "autoReload": False,
        "theme": "light",
        "timeSeriesSettingsPaneOpened": False,
        "stepSelectorEnabled": False,
    },
    "_ignoreYOutliers": False,
}

# What runs in the page. A path has one command for each of its points.
POINTS = "const points = path => path.getAttribute('d').match(/[ML]/g)?.length;"
GROUPS = "const groups = [...document.querySelectorAll('.card-group')];"
OPEN_THE_SECTIONS = f"""{GROUPS}
for (const group of groups) {{
    const wanted = arguments[0].includes(group.querySelector('.group-title')?.title);
    const open = group.querySelector('.expand-group-icon mat-icon')?.dataset.matIconName.startsWith('expand_less');
    if (open != wanted) group.querySelector('.group-toolbar')?.click();
}}
"""
POINTS_IN_SECTIONS = f"""{POINTS} {GROUPS}
const lines = card => [...card.querySelectorAll('line-chart .series-view > svg > path[d]')].map(points);
const charts = group => [...group.querySelectorAll('scalar-card')].map(
    card => [card.querySelector('.tag')?.title, lines(card)]);
return Object.fromEntries(groups.map(
    group => [group.querySelector('.group-title')?.title, Object.fromEntries(charts(group))]));
"""
BOTTOM_OF_SECTIONS = f"{GROUPS} return Math.max(...groups.map(group => group.getBoundingClientRect().bottom));"
# This older page of TensorBoard hides its elements in shadow trees.
OVERLAYS = """
const within = node => [node, ...[...node.children, ...(node.shadowRoot?.children ?? [])].flatMap(within)];
const cards = within(document.body).filter(node => node.localName == 'tf-custom-scalar-multi-line-chart-card');
"""
POINTS_IN_OVERLAYS = f"""{POINTS} {OVERLAYS}
const lines = card => within(card).filter(node => node.matches('path.line[d]')).map(points);
return Object.fromEntries(cards.map(card => [card.title, lines(card)]));
"""
OPEN_THE_LEGENDS = f"""{OVERLAYS}
const legends = cards.flatMap(within).filter(node => node.localName == 'iron-collapse');
for (const card of cards)
    if (within(card).some(node => node.matches('.iron-collapse-closed')))
        within(card).find(node => node.matches('.toggle-matches-button')).click();
return legends.every(node => node.matches('.iron-collapse-opened'));
"""
BOTTOM_OF_OVERLAYS = f"{OVERLAYS} return Math.max(...cards.map(card => card.getBoundingClientRect().bottom));"


class PicturesError(Exception):
    """Says what keeps the pictures from being made."""


def wait_until_right(problem: Callable[[], str]) -> None:
    """Ask for the problem until there is none, and fail with it after a while."""
    deadline = time.monotonic() + PATIENCE
    while found := problem():
        if time.monotonic() > deadline:
            raise PicturesError(found)
        time.sleep(0.2)


# ---------------------------------------------------------------- TensorBoard


class TensorBoard:
    """A TensorBoard server on the loopback interface, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}/"
        self._opener = build_opener(ProxyHandler({}))

    def get(self, path: str, **query: str) -> Any:
        with self._opener.open(f"{self.address}data/plugin/{path}?{urlencode(query)}", timeout=PATIENCE) as answer:
            return json.load(answer)

    def overlays(self) -> list[str]:
        """The titles of the overlay charts."""
        categories = self.get("custom_scalars/layout").get("category", [])
        return [chart["title"] for category in categories for chart in category["chart"]]

    def problem(self, steps: dict[str, int]) -> str:
        """What is missing as long as not all metrics of the sections have been loaded at all steps of the runs."""
        try:
            tags = self.get("scalars/tags")
            for run, count in steps.items():
                for tag in tags.get(run, []):
                    points = len(self.get("scalars/scalars", run=run, tag=tag))
                    if tag.partition("/")[0] in SECTIONS and points != count:
                        return f"{run} has {count} steps, and TensorBoard has {points} points of its {tag}."
        except OSError as error:
            return f"TensorBoard does not answer: {error}"
        return "" if tags.keys() >= steps.keys() else f"TensorBoard has the runs {[*tags]}, not all of {[*steps]}."


@contextlib.contextmanager
def tensorboard(logs: Path, steps: dict[str, int]) -> Iterator[TensorBoard]:
    """TensorBoard once it has loaded these steps of the runs in the logs; its process has ended afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The fast loader has tags in random order, and the default keeps no more than 1000 points.
    options = ["--load_fast", "false", "--samples_per_plugin", "scalars=1000000"]
    # A page shows the folder as it is given here, so it is given without where it is.
    options += ["--logdir", logs.name, "--host", "127.0.0.1", "--port", str(port), "--reload_interval", "1"]
    command = [sys.executable, "-m", "tensorboard.main", *options]
    with tempfile.TemporaryFile("w+") as output:
        server = subprocess.Popen(command, cwd=logs.parent, stdout=output, stderr=output)

        def problem() -> str:
            if server.poll() is not None:
                output.seek(0)
                raise PicturesError(f"TensorBoard has ended:\n{output.read()}")
            return board.problem(steps)

        try:
            board = TensorBoard(port)
            wait_until_right(problem)
            yield board
        finally:
            server.terminate()
            try:
                server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


# ---------------------------------------------------------------- the browser


@contextlib.contextmanager
def chromium() -> Iterator[Chrome]:
    """A headless Chromium with an empty profile; none of its processes is left afterwards."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (browser and driver):
        raise PicturesError("Chromium or its driver is missing; on Debian: `apt install chromium chromium-driver`.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = browser
        for flag in [*CHROMIUM_FLAGS, f"--user-data-dir={profile}"]:
            options.add_argument(flag)
        # The driver leads a group of processes, so that all of them can be ended, even those that it would leave.
        service = Service(driver, popen_kw={"start_new_session": True})
        try:
            page = Chrome(options, service)
            try:
                settings = {name: json.dumps(value) for name, value in TENSORBOARD_SETTINGS.items()}
                script = f"Object.assign(localStorage, {json.dumps(settings)});"
                page.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
                yield page
            finally:
                page.quit()
        except WebDriverException as error:
            raise PicturesError(f"Chromium: {error.msg}") from error
        finally:
            process = getattr(service, "process", None)  # there is none if the driver could not be started
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def open_page(page: Chrome, address: str, width: int) -> None:
    """Open an address in a window that is wide enough for its charts, and tall enough to draw all of them."""
    size = {"width": width, "height": WINDOW_HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.get("about:blank")  # else an address that differs after its # only is not loaded
    page.get(address)


def photograph(page: Chrome, width: int, height: float) -> bytes:
    """The top of the page as a PNG, once it stays the same."""
    area = {"x": 0, "y": 0, "width": width, "height": round(height), "scale": 1}
    pictures = [b"", b""]

    def problem() -> str:
        answer = page.execute_cdp_cmd("Page.captureScreenshot", {"clip": area, "captureBeyondViewport": False})
        pictures[:] = [pictures[1], base64.b64decode(answer["data"])]
        return "" if pictures[0] == pictures[1] else "The page does not stop changing."

    wait_until_right(problem)
    return pictures[1]


# ---------------------------------------------------------------- the two pages


def sections(page: Chrome, board: TensorBoard, steps: dict[str, int]) -> bytes:
    """A picture of the sections, in which every chart has a line for every run, with a point for every step."""

    def problem() -> str:
        page.execute_script(OPEN_THE_SECTIONS, SECTIONS)
        shown = page.execute_script(POINTS_IN_SECTIONS)
        for section in SECTIONS:
            if not shown.get(section):
                return f'TensorBoard shows no charts in a section "{section}", only {shown}.'
            for tag, points in shown[section].items():
                if sorted(points) != sorted(steps.values()):
                    return f"TensorBoard draws lines of {points} points for {tag}, and the runs have the steps {steps}."
        return ""

    open_page(page, f"{board.address}?darkMode=false&forceSVG=true&smoothing=0#timeseries", WIDTH_OF_SECTIONS)
    wait_until_right(problem)
    return photograph(page, WIDTH_OF_SECTIONS, page.execute_script(BOTTOM_OF_SECTIONS))


def overlays(page: Chrome, board: TensorBoard, steps: dict[str, int]) -> bytes:
    """A picture of the overlay charts, in which every run has the same number of lines, with a point for every step."""
    titles = board.overlays()

    def problem() -> str:
        shown = page.execute_script(POINTS_IN_OVERLAYS)
        if not titles or list(shown) != titles:
            return f"TensorBoard shows the overlay charts {list(shown)}, and the layout that was logged has {titles}."
        for title, points in shown.items():
            lines_per_run = max(1, len(points) // len(steps))
            if sorted(points) != sorted([*steps.values()] * lines_per_run):
                return f"TensorBoard draws lines of {points} points in {title!r}, and the runs have the steps {steps}."
        return "" if page.execute_script(OPEN_THE_LEGENDS) else "TensorBoard does not show the legends of its charts."

    open_page(page, f"{board.address}?darkMode=false#custom_scalars&_smoothingWeight=0", WIDTH_OF_OVERLAYS)
    wait_until_right(problem)
    return photograph(page, WIDTH_OF_OVERLAYS, page.execute_script(BOTTOM_OF_OVERLAYS) + 44)


def photographs(logs: Path) -> dict[str, bytes]:
    """Pictures of TensorBoard on these logs, by the name of their file."""
    steps = {run.name: len(run.values("time/step_ms")) for run in read_runs(logs)}
    if sorted(steps) != RUNS:
        raise PicturesError(f"{logs} has the runs {sorted(steps)} instead of {RUNS}.")
    with tensorboard(logs, steps) as board, chromium() as page:
        return {
            "tensorboard.png": sections(page, board, steps),
            "tensorboard-overlay.png": overlays(page, board, steps),
        }


def make(logs: Path, output: Path) -> None:
    """Write all pictures of these logs."""
    pictures = photographs(logs / "demo")
    output.mkdir(parents=True, exist_ok=True)
    draw(logs / "demo-csv", output=output / "demo.png")
    for name, picture in pictures.items():
        (output / name).write_bytes(picture)
    print("Written:", *(output / name for name in ("demo.png", *pictures)))


def main() -> None:
    """Train the demo unless its logs are given, and make its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, help="folder that examples/demo.py has written; default: train it now")
    parser.add_argument("--output", type=Path, default=DOCS, help="where the pictures are written; default: docs/")
    args, flags = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that what was started is ended
    with contextlib.ExitStack() as stack:
        if args.logs is None:
            args.logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if subprocess.run([sys.executable, str(DEMO), "--logs", str(args.logs), *flags]).returncode:
                sys.exit("The demo failed.")
        elif flags:
            parser.error(f"with --logs the demo is not trained, so it has no use for {flags}")
        try:
            make(args.logs.resolve(), args.output)
        except (PicturesError, ReportError) as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
