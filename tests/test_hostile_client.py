"""An ordinary client has no errors beside a hostile one. Its gaps are measured, not asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment

PROGRAM = Path(__file__).with_name("hostile_client.py")


@pytest.mark.long
def test_an_ordinary_client_is_served_beside_a_hostile_one(tmp_path: Path) -> None:
    short = ["--seconds", "0.5", "--repetitions", "1", "--clients", "2", "--hostile", "2"]
    file = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, PROGRAM, *short, "--json", file],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert len(rows) == 9
    for row in rows:
        assert row["errors"] == [], row
        assert row["memory"] < rows[0]["memory"] + 1000, row
        assert row["behaviour"] in done.stdout


def test_only_servers_of_this_machine_are_attacked() -> None:
    command = [sys.executable, PROGRAM, "--url", "http://example.com"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--url must be a server of this machine" in done.stderr
