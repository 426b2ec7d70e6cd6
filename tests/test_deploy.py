"""The files of deploy/ fit each other, the options of `serve`, and the metrics of the server."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from live_server import LiveServer, serving, spelling_model
from prometheus_client.parser import text_string_to_metric_families

from xlstm7b.cli import app
from xlstm7b.cli.settings import variable_of
from xlstm7b.generate import Generator
from xlstm7b.serve.server import _SHUTDOWN_TIMEOUT
from xlstm7b.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SERVE: Any = typer.main.get_command(app).commands["serve"]
DEFAULTS = {param.name: param.default for param in SERVE.params}
VARIABLES = {variable_of(name) for name in DEFAULTS}


def load(name: str) -> Any:
    """A file of YAML or JSON."""
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def options_of(words: list[str]) -> dict[str, Any]:
    """What `xlstm7b WORDS` gets; the words must be those of `serve`."""
    assert words[:1] == ["serve"]
    return SERVE.make_context("serve", ["--config", str(DEPLOY / "serve.toml"), *words[1:]]).params


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def least_grace() -> float:
    """Seconds that the server may need to stop, with the file or without it."""
    drain = max(options_of(["serve"])["drain_seconds"], DEFAULTS["drain_seconds"])
    return drain + _SHUTDOWN_TIMEOUT


# The image


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word
    ]


def last_stage() -> list[tuple[str, str]]:
    steps = instructions()
    return steps[max(n for n, (word, _) in enumerate(steps) if word == "FROM") :]


def image_variables() -> dict[str, str]:
    words = shlex.split(" ".join(rest for word, rest in last_stage() if word == "ENV"))
    return dict(word.split("=", 1) for word in words)


def test_the_image_copies_what_exists_and_is_not_ignored() -> None:
    ignored = [
        line
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    assert ignored[0] == "*"
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    copied = [rest.split()[:-1] for word, rest in instructions() if word == "COPY"]
    own = {Path(name) for names in copied for name in names if not names[0].startswith("--from")}
    assert {str(path) for path in own} == allowed
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {project["readme"], *project["license-files"]} <= allowed  # the build reads them


def test_the_image_has_one_user_with_two_folders() -> None:
    words = dict(last_stage())
    user = words["USER"].partition(":")[0]
    assert int(user) > 0
    assert f"--uid {user}" in dict(last_stage())["RUN"]
    volumes = json.loads(words["VOLUME"])
    for folder in volumes:
        assert folder in words["RUN"]
    variables = image_variables()
    folders = [path for path in variables.values() if path.startswith("/var/")]
    assert len(folders) == 5
    assert all(any(path.startswith(folder) for folder in volumes) for path in folders)
    assert variables["PATH"].split(":")[0] == "/opt/xlstm7b/bin"
    assert words["STOPSIGNAL"] == "SIGTERM"


def test_the_images_variables_and_command_are_those_of_serve() -> None:
    own = {name for name in image_variables() if name.startswith("XLSTM7B_")}
    assert own == {variable_of(name) for name in ("host", "port", "states_folder", "cache_folder")}
    words = dict(last_stage())
    assert words["EXPOSE"] == image_variables()["XLSTM7B_PORT"] == str(DEFAULTS["port"])
    program, *rest = json.loads(words["ENTRYPOINT"]) + json.loads(words["CMD"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert program in project["scripts"]
    assert options_of(rest)["model"]


def test_the_image_has_no_secrets_and_its_bases_have_versions() -> None:
    for word, rest in instructions():
        if word in ("ARG", "ENV"):
            assert not re.search(r"token|secret|password|api_key", rest, re.I)
        if word == "ARG" and "_BASE=" in rest:
            assert re.search(r":[\w.-]*\d", rest)
    stages = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert stages == ["${CPU_BASE}", "${CUDA_BASE}", "${DEVICE}", "${DEVICE}"]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A server that has answered a completion."""
    with serving(Generator(spelling_model("abc"), ByteTokenizer())) as started:
        started.post("/v1/completions", prompt="a", max_tokens=2)
        yield started


def test_the_health_check_asks_the_server(live: LiveServer) -> None:
    check = dict(last_stage())["HEALTHCHECK"]
    program, *words = json.loads(check.partition("CMD ")[2])
    assert program == "python3"

    def status(port: int) -> int:
        variables = {**os.environ, "XLSTM7B_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
        done = subprocess.run([sys.executable, *words], env=variables, capture_output=True)
        return done.returncode

    port = int(live.url.rpartition(":")[2])
    assert status(port) == 0
    live.service.draining.set()
    assert status(port) == 1
    live.service.draining.clear()
    assert status(1) == 1  # nothing listens


# compose


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_what_compose_names_exists(name: str) -> None:
    compose = load(name)
    for service in compose["services"].values():
        build = service.get("build", {})
        if "context" in build:
            assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
        declared = {rest.partition("=")[0] for word, rest in instructions() if word == "ARG"}
        assert build.get("args", {}).keys() <= declared
        for mount in service.get("volumes", []):
            source, target, *_ = mount.split(":")
            assert target.startswith("/")
            # The reader makes the folder of models.
            assert (
                source in compose["volumes"] or source == "./models" or (DEPLOY / source).exists()
            )
        secrets = service.get("secrets", [])
        assert set(secrets) <= compose.get("secrets", {}).keys()
        own = {key for key in service.get("environment", {}) if key.startswith("XLSTM7B_")}
        assert own <= VARIABLES
        for value in service.get("environment", {}).values():
            if value.startswith("/run/secrets/"):
                assert value.removeprefix("/run/secrets/") in secrets


def test_compose_runs_the_image_as_it_is_meant() -> None:
    server = load("compose.yaml")["services"]["server"]
    assert seconds(server["stop_grace_period"]) > least_grace()
    targets = {mount.split(":")[1] for mount in server["volumes"]}
    assert targets >= set(json.loads(dict(last_stage())["VOLUME"]))
    assert server["environment"]["XLSTM7B_CONFIG"] in targets
    port = image_variables()["XLSTM7B_PORT"]
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert server["read_only"]
    assert server["init"]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    for secret in load("compose.yaml")["secrets"].values():
        path = os.path.normpath(Path("deploy") / secret["file"])
        assert any(path.startswith(folder) for folder in ignored if folder)


def test_prometheus_and_grafana_find_each_other() -> None:
    services = load("compose.yaml")["services"]
    config = load("prometheus/prometheus.yml")
    (scrape,) = config["scrape_configs"]
    ((target,),) = [static["targets"] for static in scrape["static_configs"]]
    assert target == f"server:{image_variables()['XLSTM7B_PORT']}"
    key = scrape["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert key in services["prometheus"]["secrets"]
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
    (source,) = load("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load("grafana/provisioning/dashboards/xlstm7b.yml")["providers"]
    targets = {mount.split(":")[1] for mount in services["grafana"]["volumes"]}
    assert provider["options"]["path"] in targets
    dashboard = load("grafana/dashboards/xlstm7b.json")
    (default,) = [v for v in dashboard["templating"]["list"] if v["type"] == "datasource"]
    assert default["current"]["value"] == source["uid"]


# systemd


def unit() -> dict[str, list[str]]:
    """The settings of [Service]; some are given several times."""
    text = (DEPLOY / "systemd/xlstm7b.service").read_text(encoding="utf-8")
    RawConfigParser(strict=False).read_string(text)
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", text, re.M):
        found.setdefault(key, []).append(value)
    return found


def example_variables() -> dict[str, str]:
    text = (DEPLOY / "systemd/serve.env").read_text(encoding="utf-8")
    return dict(re.findall(r"^#?([A-Z0-9_]+)=(.*)$", text, re.M))


def test_the_unit_runs_serve_with_options_that_exist() -> None:
    service = unit()
    (command,) = service["ExecStart"]
    assert options_of(command.split()[1:])["model"]
    named = {value.partition("=")[0] for value in service["Environment"]}
    named |= example_variables().keys()
    assert {name for name in named if name.startswith("XLSTM7B_")} <= VARIABLES
    assert len(named & VARIABLES) == 6
    assert seconds(service["TimeoutStopSec"][0]) > least_grace()
    assert service["User"] == ["xlstm7b"]


def test_the_units_folders_are_those_of_the_image() -> None:
    places = {"%S": "/var/lib", "%C": "/var/cache"}
    variables = {}
    for line in unit()["Environment"]:
        name, _, value = line.partition("=")
        variables[name] = re.sub("%[SC]", lambda found: places[found[0]], value)
    image = image_variables()
    folders = {name for name, value in image.items() if value.startswith("/var/")}
    assert {name: variables[name] for name in folders} == {name: image[name] for name in folders}


# Metrics

METRIC = re.compile(r"\b(?:xlstm7b:|process_)\w+")


def expressions() -> Iterator[str]:
    """All PromQL of the dashboard and the alerts."""
    dashboard = load("grafana/dashboards/xlstm7b.json")
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    for group in load("prometheus/alerts.yml")["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_metrics_and_labels_of_dashboard_and_alerts_exist(live: LiveServer) -> None:
    text = live.client.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    shown = set()
    for expression in expressions():
        named = METRIC.findall(expression)
        assert named or expression.startswith("up{")
        shown |= set(named)
        assert set(named) <= labels.keys(), expression
        matched = re.findall(r"(\w+)=~?\"", expression)
        grouped = [
            label.strip()
            for group in re.findall(r"\bby \(([^)]*)\)", expression)
            for label in group.split(",")
        ]
        known = set.union({"instance", "job"}, *(labels[name] for name in named))
        assert {*matched, *grouped} <= known, expression
    # Everything that the docs list can be seen, but for what a quotient or a quantile uses.
    own = {name for name in labels if name.startswith("xlstm7b:")}
    unseen = {name for name in own - shown if not name.endswith(("_count", "_sum", "_created"))}
    assert unseen == {"xlstm7b:slot_usage_perc"}


# docs/deployment.md


def test_the_page_names_files_and_variables_that_exist() -> None:
    page = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    for name in re.findall(r"deploy/[\w./-]*\w", page):
        made = ("deploy/secrets", "deploy/models")
        assert name.startswith(made) or (ROOT / name).exists(), name
    for name in set(re.findall(r"XLSTM7B_[A-Z_]*[A-Z]", page)):
        assert name in VARIABLES, name
