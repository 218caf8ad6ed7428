"""The files of ``deploy/`` name what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from paceline.cli import serve
from paceline.server.metrics import Metrics
from paceline.server.observer import Observer

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def sample_names() -> set[str]:
    """Of everything that a scrape may hold."""
    names = set()
    for family in Metrics(Observer(), "m", 1).collect():
        endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
        names |= {family.name + ending for ending in endings[family.type]}
    return names


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "paceline.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        asked = set(re.findall(r"paceline:\w+", expression))
        assert asked
        assert asked <= sample_names(), expression
    source = (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    uids = {panel["datasource"]["uid"] for panel in board["panels"]}
    assert all(f"uid: {uid}\n" in source for uid in uids)


def test_what_is_copied_and_mounted_exists() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert copied
    assert all((ROOT / name).exists() for line in copied for name in line.split())
    mounts = re.findall(r"- (\./\S+?):/", (DEPLOY / "compose.yaml").read_text())
    assert len(mounts) == 3
    assert all((DEPLOY / name).exists() for name in mounts)


def test_the_image_starts_what_there_is() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    command: list[Any] = []
    for line in lines:
        if line.startswith(("ENTRYPOINT ", "CMD ")):
            command += json.loads(line.split(" ", 1)[1])
    assert command[:2] == ["paceline", "serve"]
    parsed = vars(serve._parser().parse_args(command[2:]))
    assert parsed["server.host"] == "0.0.0.0"
    assert parsed["positional"] == ["paceline/demo"]
