"""An MLflow server's REST API 2.0, without MLflow's package. Nothing that the server answers is trusted.

Source: https://mlflow.org/docs/latest/rest-api.html; the limits are those of `mlflow/utils/validation.py`.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from utils.common.bounded_http import JsonServer, ServerError
from utils.common.errors import UsageError, printable

MOST_METRICS, MOST_PARAMS = 1000, 100  # of a call
MOST_NAME_CHARACTERS, MOST_PARAM_CHARACTERS, MOST_TAG_CHARACTERS = 250, 6000, 5000
NO_SUCH_THING = "RESOURCE_DOES_NOT_EXIST"
API, ARTIFACTS = "/api/2.0/mlflow/", "/api/2.0/mlflow-artifacts/artifacts/"


@dataclass
class Metric:
    """A metric's value at a step. MLflow keeps one of several that are equal in all four."""

    key: str
    value: float
    timestamp: int  # milliseconds since 1970
    step: int


@dataclass
class Run:
    """What a server knows of a run."""

    run_id: str
    experiment_id: str
    status: str
    artifacts: str  # path of the run's files below the server's address; empty where the server does not take them
    is_deleted: bool
    params: set[str] = field(default_factory=set)
    latest: dict[str, Metric] = field(default_factory=dict)  # each metric's value at its last step


def checked_uri(text: str, name: str) -> str:
    """Return a server's address. Raises UsageError, which names `name`, for any other text."""
    if "@" in text:
        raise UsageError(
            f"{name}: the address holds a user or a password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_address = is_address and not parts.query and not parts.fragment
    except ValueError:
        is_address = False
    if not is_address or not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError(f"{name} {printable(text)}: expected a server's address such as http://127.0.0.1:5000")
    return text.rstrip("/")


def authorization(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the header for the environment's credentials. As in MLflow, user and password come before a token."""
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
    user, password, token = (environment.get(name, "") for name in names)
    if user and password:
        return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
    if not (token.isascii() and token.isprintable()):  # http.client would show it in its error
        raise UsageError("MLFLOW_TRACKING_TOKEN: holds a character that no HTTP header may hold, such as a line break")
    return {"Authorization": f"Bearer {token}"} if token else {}


def allowed_name(text: object) -> str:
    """Return a name of characters that MLflow allows for metrics and parameters."""
    return re.sub(r"[^\w.\- ]", "_", str(text), flags=re.ASCII)[:MOST_NAME_CHARACTERS]


class MlflowServer:
    """Calls the API. Every method raises ServerError, also for an answer that MLflow would not give."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self._server = JsonServer(url, headers)

    @property
    def progress_s(self) -> float:
        """When the server last got on with a request, by `time.monotonic`."""
        return self._server.progress_s

    def experiment_id(self, name: str) -> str:
        """Return the number of the experiment of this name; create it if there is none."""
        try:
            found = _object(self._get("experiments/get-by-name", experiment_name=name).get("experiment"))
        except ServerError as error:
            if error.code != NO_SUCH_THING:
                raise
            found = self._post("experiments/create", name=name)
        return _identity(found.get("experiment_id"))

    def create_run(self, experiment_id: str, name: str, tags: Mapping[str, str]) -> Run:
        """Create a run that is running."""
        created = self._post(
            "runs/create",
            experiment_id=experiment_id,
            run_name=name[:MOST_NAME_CHARACTERS],
            start_time=_now_ms(),
            tags=[{"key": key, "value": value[:MOST_TAG_CHARACTERS]} for key, value in tags.items()],
        )
        return self._run_of(created.get("run"))

    def get_run(self, run_id: str) -> Run | None:
        """Return a run; None if the server has none of this name."""
        try:
            return self._run_of(self._get("runs/get", run_id=run_id).get("run"))
        except ServerError as error:
            if error.code != NO_SUCH_THING:
                raise
            return None

    def find_run(self, experiment_id: str, tag: str, value: str) -> Run | None:
        """Return the newest run of an experiment that has this tag; None if there is none."""
        found = self._post(
            "runs/search", experiment_ids=[experiment_id], filter=f"tags.{tag} = '{value}'", max_results=1
        )
        runs = _objects(found.get("runs"))
        return self._run_of(runs[0]) if runs else None

    def log_params(self, run: Run, params: Mapping[str, object]) -> None:
        """Set the parameters that the run lacks. A parameter cannot change."""
        values = {allowed_name(key): str(value)[:MOST_PARAM_CHARACTERS] for key, value in params.items()}
        missing = [{"key": key, "value": value} for key, value in values.items() if key not in run.params]
        for part in _slices(missing, MOST_PARAMS):
            self._post("runs/log-batch", run_id=run.run_id, params=part)
            run.params |= {param["key"] for param in part}

    def log_metrics(self, run: Run, metrics: Sequence[Metric]) -> None:
        """Add metrics, given in the order of their steps; `run.latest` follows."""
        for part in _slices(metrics, MOST_METRICS):
            self._post("runs/log-batch", run_id=run.run_id, metrics=[vars(metric) for metric in part])
            run.latest |= {metric.key: metric for metric in part}

    def set_status(self, run: Run, status: str) -> None:
        """Set RUNNING, FINISHED, FAILED or KILLED; all but the first also set the run's end."""
        if run.status != status:
            ended = {} if status == "RUNNING" else {"end_time": _now_ms()}
            self._post("runs/update", run_id=run.run_id, status=status, **ended)
            run.status = status

    def upload(self, run: Run, file: Path) -> None:
        """Send a file to the run's artifacts. Raises OSError when it cannot be opened."""
        self._server.upload(f"{run.artifacts}/{quote(file.name)}", file)

    def page_of(self, run: Run) -> str:
        """Return the address that shows a run in a browser."""
        return f"{self.url}/#/experiments/{run.experiment_id}/runs/{run.run_id}"

    def _get(self, method: str, **query: str) -> dict[str, Any]:
        return self._server.call("GET", f"{API}{method}?{urlencode(query)}")

    def _post(self, method: str, **content: Any) -> dict[str, Any]:
        return self._server.call("POST", API + method, content)

    def _run_of(self, answer: object) -> Run:
        run = _object(answer)
        info, data = _object(run.get("info")), _object(run.get("data", {}))
        place = _place(info.get("artifact_uri"))
        is_here = place.scheme == "mlflow-artifacts" and place.netloc in ("", urlsplit(self.url).netloc)
        metrics = [_metric_of(metric) for metric in _objects(data.get("metrics"))]
        return Run(
            run_id=_identity(info.get("run_id")),
            experiment_id=_identity(info.get("experiment_id")),
            status=str(info.get("status")),
            artifacts=ARTIFACTS + quote(place.path.strip("/")) if is_here else "",
            is_deleted=info.get("lifecycle_stage") == "deleted",
            params={str(param.get("key")) for param in _objects(data.get("params"))},
            latest={metric.key: metric for metric in metrics},
        )


def _object(answer: object) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise _foreign("an object is missing")
    return answer


def _objects(answer: object) -> list[dict[str, Any]]:
    if not isinstance(answer, list | None):
        raise _foreign("a list is missing")
    return [_object(item) for item in answer or []]


def _identity(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][\w-]{0,255}", value, re.ASCII):
        raise _foreign("the name of a run or an experiment is missing")
    return value


def _metric_of(answer: dict[str, Any]) -> Metric:
    try:
        key, value = str(answer["key"]), float(answer["value"])
        return Metric(key, value, int(answer["timestamp"]), int(answer.get("step", 0)))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _foreign("a metric is incomplete") from error


def _place(artifact_uri: object) -> Any:
    try:
        return urlsplit(str(artifact_uri))
    except ValueError:
        return urlsplit("")


def _foreign(what: str) -> ServerError:
    return ServerError(f"{what} in an answer; is this an MLflow server?")


def _slices(items: Sequence[Any], length: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), length):
        yield items[start : start + length]


def _now_ms() -> int:
    return int(time.time() * 1000)
