"""What the webhook writes is what the engine reads: both write it down, since neither may load the other's module."""

from pathlib import Path

import tomllib

from kvoffload.api import keys
from kvoffload_engine import compat, environment
from kvoffload_operator.webhook import prediction


def test_the_webhook_writes_the_variables_that_the_engine_reads() -> None:
    assert environment.SOCKET_VARIABLE == keys.ENV_SOCKET
    assert environment.POOL_VARIABLE == keys.ENV_POOL
    assert environment.REPLICATED_LAYOUT_VARIABLE == keys.ENV_REPLICATED_LAYOUT
    assert environment.WEIGHTS_ID_VARIABLE == keys.ENV_WEIGHTS_ID
    assert environment.DEADLINE_VARIABLE == keys.ENV_STEP_DEADLINE


def test_the_webhook_refuses_the_versions_that_the_engine_leaves_alone() -> None:
    assert (prediction.MIN_VLLM, prediction.MAX_VLLM) == (compat.OLDEST, compat.NEWEST)


def test_the_webhook_names_the_plugin_as_the_entry_point_does() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert list(project["entry-points"]["vllm.general_plugins"]) == [keys.PLUGIN_NAME]
