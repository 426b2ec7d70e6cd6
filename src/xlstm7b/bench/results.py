"""Results of a benchmark: printed as they are measured, and appended to a JSON Lines file.

A line of the file is one figure, or one curve with arrays `x` and `y`. docs/results/ holds such
files; benchmarks/render.py makes the tables and pictures of the docs from them.
"""

import json
import math
import os
import platform
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from xlstm7b.report import counted

Shape = Mapping[str, int | float | str]
OURS = "xlstm7b"
LOWER_IS_BETTER = ("s", "ms", "µs", "GB")
MOST_POINTS = 100  # of a curve


class Results:
    """The results of one benchmark on one device.

    `call` names the run in which figures were measured. Figures are compared with each other only
    if they have the same `call`: then they come from one machine, at about the same time. With a
    `call` that the file already has, the run is continued: `has` is true for what was measured.
    """

    def __init__(
        self,
        subject: str,
        device: str,
        *,
        file: Path | None = None,
        call: str | None = None,
        command: str | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        """`command` is recorded; by default it is this process's own. So are the versions of torch,
        of Triton on a GPU, and of `packages`."""
        if file is not None:
            check_target(file)
        self.file, self.device = file, device
        self.failed = False
        self.call = call or uuid.uuid4().hex[:8]
        self.reread()
        self._about: dict[str, Any] = {
            "subject": subject,
            "machine": machine_name(device),
            "date": date.today().isoformat(),
            "versions": versions(device, packages),
            "command": command or command_line(),
            "call": self.call,
        }
        self._heading = ""
        print(f"{self._about['machine']}, {_joined(self._about['versions'])}", flush=True)

    def reread(self) -> None:
        """Also knows what other processes have appended to the file."""
        self.rows = [] if self.file is None else read_rows(self.file)
        self._done = {_key(row) for row in self.rows if row["call"] == self.call}

    def has(self, what: str, shape: Shape, system: str = OURS) -> bool:
        """Whether this run has measured it before, or has found that it fails."""
        return _key({"what": what, "shape": shape, "system": system}) in self._done

    def add(
        self,
        what: str,
        shape: Shape,
        value: float,
        unit: str,
        *,
        system: str = OURS,
        limit: float | None = None,
        spread: float | None = None,
        note: str | None = None,
    ) -> None:
        """Records one figure.

        `limit` is the best value that the hardware allows, in the same unit. `spread` is half the
        range of repeated timings, relative to the value. `note` says how the system was run.
        """
        if not math.isfinite(value):
            raise ValueError(f"{what} of {system} is {value}")
        figure = {"value": value, "unit": unit, "limit": limit, "spread": spread, "note": note}
        self._append(what, shape, system, figure)

    def add_curve(
        self,
        what: str,
        shape: Shape,
        x: Sequence[float],
        y: Sequence[float],
        unit: str,
        *,
        x_unit: str,
        system: str = OURS,
        note: str | None = None,
    ) -> None:
        """Records one curve, thinned to 100 points. The first and the last point stay."""
        step = max(1, math.ceil((len(x) - 1) / (MOST_POINTS - 1)))
        chosen = sorted({*range(0, len(x), step), len(x) - 1}) if len(x) else []
        points = {"x": [x[i] for i in chosen], "y": [y[i] for i in chosen]}
        self._append(what, shape, system, points | {"unit": unit, "x_unit": x_unit, "note": note})

    def fail(self, what: str, shape: Shape, error: object, *, system: str = OURS) -> None:
        """Records that something could not be measured, and why. It is not tried again."""
        self.failed = True
        self._append(what, shape, system, {"error": " ".join(str(error).split())[:200]})

    def _append(self, what: str, shape: Shape, system: str, figure: dict[str, Any]) -> None:
        own = {"what": what, "shape": dict(shape), "system": system}
        measured = {key: _rounded(value) for key, value in figure.items() if value is not None}
        row = {"subject": self._about["subject"]} | own | measured | self._about
        self.rows.append(row)
        self._done.add(_key(row))
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if (heading := _joined(shape)) != self._heading:
            print(f"\n{heading}")
            self._heading = heading
        print(f"  {shown_row(row)}", flush=True)


def shown_row(row: Mapping[str, Any]) -> str:
    """One line of text: what and whose it is, the value, and how near it is to its limit."""
    case = f"{row['what']:20} {row['system']:16}"
    if "error" in row:
        return f"{case} failed: {row['error']}"
    if "x" in row:
        return f"{case} {counted(len(row['x']), 'point')}, last {row['y'][-1]:,.4g} {row['unit']}"
    parts = [f"{case} {shown_number(row['value']):>12} {row['unit']:8}"]
    if row.get("limit"):
        parts.append(f"{percent_of_limit(row):5.1f}% of {shown_number(row['limit'])}")
    if row.get("spread") is not None:
        parts.append(f"±{row['spread']:.1%}")
    if row.get("note"):
        parts.append(row["note"])
    return "  ".join(parts).rstrip()


def shown_number(value: float) -> str:
    """Three significant digits below 100, else a whole number: 3.54, 28.3, 9,657."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{digits}f}"


def percent_of_limit(row: Mapping[str, Any]) -> float:
    value, limit = row["value"], row["limit"]
    return float(100 * (limit / value if row["unit"] in LOWER_IS_BETTER else value / limit))


def check_target(file: Path) -> None:
    """`ValueError` if nothing can be appended to this file."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"cannot write {file}: there is no folder {folder}")
    if file.is_dir():
        raise ValueError(f"cannot write {file}: it is a folder")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ValueError(f"cannot write {file}: no write permission")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The lines of a results file, if it exists. `ValueError` if it is another kind of file."""
    if not file.exists():
        return []
    rows = []
    with file.open(encoding="utf-8") as lines:
        try:
            for line in lines:
                rows.append(json.loads(line))
                if not {"what", "shape", "system", "call"} <= rows[-1].keys():
                    raise ValueError("a field is missing")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} exists and holds no results: choose another file") from error
    return rows


def machine_name(device: str) -> str:
    """The GPU, or the architecture and threads of the CPU."""
    if device == "none":  # the work is done elsewhere, as by a server
        return f"{platform.machine()}, {counted(os.cpu_count() or 1, 'core')}"
    import torch

    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')}"


def versions(device: str, packages: Sequence[str] = ()) -> dict[str, str]:
    """Versions of torch, of Triton on a GPU, and of other packages that are installed."""
    found = {}
    for name in dict.fromkeys(("torch", *(["triton"] * device.startswith("cuda")), *packages)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command_line(secrets: Sequence[str] = ("--api-key",)) -> str:
    """This process's command, without the values of secret options."""
    name = Path(sys.argv[0])
    is_script = name.suffix == ".py" and name.name != "__main__.py"
    words = [f"python {name.parent.name}/{name.name}" if is_script else "xlstm7b"]
    hidden = False
    for word in sys.argv[1:]:
        option, has_value, _ = word.partition("=")
        if not hidden and option not in secrets:
            words.append(shlex.quote(word))
        hidden = option in secrets and not has_value
    return " ".join(words)


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["what"], json.dumps(dict(row["shape"]), sort_keys=True), row["system"]


def _joined(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _rounded(value: Any) -> Any:
    """Five significant digits: more are noise, and make the files hard to read."""
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value
