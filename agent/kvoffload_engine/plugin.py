"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes, before it builds a
configuration.

    EngineArgs.create_engine_config, wrapped
        1. vLLM builds the configuration as the user asked           (an exception here is the user's: passed on)
        2. preflight                                                  obstacle -> that configuration, and one line why
        3. vLLM builds it again with our kv_transfer_config           exception -> the first one, and one line why
        4. what the connector flipped is put back (multimodal inputs)

The decision is taken once and remembered in the environment (`KVOFFLOAD_DECISION`), so that API servers, engine
cores and workers cannot differ. `register` never raises.
"""

import copy
import dataclasses
import functools
import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvoffload import __version__
from kvoffload.errors import UnsupportedEngine
from kvoffload_engine import compat
from kvoffload_engine.environment import (
    BLOCKS_PER_CHUNK_VARIABLE,
    DECISION_VARIABLE,
    POOL_VARIABLE,
    SOCKET_VARIABLE,
)
from kvoffload_engine.log import logger
from kvoffload_engine.preflight import PreflightReason, first_obstacle, observe_engine

if TYPE_CHECKING:
    from kvoffload.protocol.client import Connector

CONNECTOR = "KVOffloadConnector"
CONNECTOR_MODULE = "kvoffload_engine.connector"
SPEC = "KVOffloadSpec"
SPEC_MODULE = "kvoffload_engine.spec"
MAX_BLOCKS_PER_CHUNK = 64
_WRAPPED = "_kvoffload_wrapped"


@dataclass(frozen=True, slots=True)
class Decision:
    """Attach or leave alone, for this pod's engine in all its processes."""

    attach: bool
    reason: str
    message: str
    engine_id: str
    model: str

    def remember(self) -> None:
        """For processes started from here on."""
        os.environ[DECISION_VARIABLE] = json.dumps(dataclasses.asdict(self))


def remembered_decision(model: str) -> Decision | None:
    """What another process of this engine decided, None if nothing, nothing readable, or for another model."""
    try:
        decision = Decision(**json.loads(os.environ[DECISION_VARIABLE]))
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    is_whole = all(type(getattr(decision, field.name)) is field.type for field in dataclasses.fields(decision))
    return decision if is_whole and decision.model == model else None


def register() -> None:
    """Wrap vLLM's way to a configuration, where a pool's socket is named. Never raises."""
    try:
        if os.environ.get(SOCKET_VARIABLE):
            wrap_engine_args()
    except Exception as error:  # noqa: BLE001 - whatever it is, vLLM must start without us
        leave_alone(PreflightReason.PLUGIN_ERROR.value, f"{type(error).__name__}: {error}")


def wrap_engine_args() -> None:
    """Put `build_configuration` around EngineArgs.create_engine_config, once."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return build_configuration(original, self, *args, **kwargs)

    setattr(create_engine_config, _WRAPPED, True)
    EngineArgs.create_engine_config = create_engine_config


def build_configuration(original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's configuration, with our connector if nothing speaks against it."""
    as_asked = copy.copy(engine_args)
    config = original(as_asked, *args, **kwargs)
    model = str(config.model_config.model)
    decision = remembered_decision(model)
    if decision is None:
        try:
            decision = decide(config, model)
        except Exception as error:  # noqa: BLE001 - as in register
            decision = Decision(
                False, PreflightReason.PLUGIN_ERROR.value, f"{type(error).__name__}: {error}", "", model
            )
        decision.remember()
        if not decision.attach:
            leave_alone(decision.reason, decision.message, config)
    if decision.attach:
        try:
            return build_with_connector(original, engine_args, config, decision, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - as in register
            message = f"with the connector vLLM says {type(error).__name__}: {error}"
            Decision(False, PreflightReason.CONFIGURATION_FAILED.value, message, "", model).remember()
            leave_alone(PreflightReason.CONFIGURATION_FAILED.value, message, config)
    vars(engine_args).update(vars(as_asked))
    return config


def decide(config: Any, model: str) -> Decision:
    """Look at the configuration that the user asked for."""
    try:
        compat.require_supported_version(compat.installed_version())
    except UnsupportedEngine as error:
        return Decision(False, PreflightReason.UNSUPPORTED_VERSION.value, str(error), "", model)
    facts = observe_engine(config)
    obstacle = first_obstacle(facts)
    if obstacle is not None:
        return Decision(False, obstacle.reason.value, obstacle.message, "", model)
    try:
        compat.require_names()
    except UnsupportedEngine as error:
        return Decision(False, PreflightReason.MISSING_NAME.value, str(error), "", model)
    note = "" if facts.prefix_caching else "vLLM's own prefix cache is off: every hit is the pool's"
    return Decision(True, "", note, str(uuid.uuid4()), model)


def build_with_connector(
    original: Callable[..., Any], engine_args: Any, as_asked: Any, decision: Decision, *args: Any, **kwargs: Any
) -> Any:
    """Build again with our connector, and put back what a connector flips."""
    from vllm.config import KVTransferConfig

    before = engine_args.kv_transfer_config
    engine_args.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        engine_id=decision.engine_id,
        kv_connector_extra_config={
            "spec_name": SPEC,
            "spec_module_path": SPEC_MODULE,
            "kvoffload_socket": os.environ[SOCKET_VARIABLE],
            "blocks_per_chunk": blocks_per_chunk(os.environ),
        },
    )
    try:
        config = original(engine_args, *args, **kwargs)
    except BaseException:
        engine_args.kv_transfer_config = before
        raise
    restore_multimodal(config, as_asked)
    logger.info(
        "kvoffload %s: this engine offloads its KV cache to pool %s%s",
        __version__,
        os.environ.get(POOL_VARIABLE, "(unnamed)"),
        f" ({decision.message})" if decision.message else "",
    )
    return config


def blocks_per_chunk(environment: Mapping[str, str]) -> int:
    """How many blocks make a chunk: 1, or what the user asks for; 1 for anything that is no such number."""
    text = environment.get(BLOCKS_PER_CHUNK_VARIABLE, "") or "1"
    if text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MAX_BLOCKS_PER_CHUNK:
        return int(text)
    logger.warning(
        "kvoffload: %s is %r, needed a whole number from 1 to %d: 1 is used",
        BLOCKS_PER_CHUNK_VARIABLE,
        text,
        MAX_BLOCKS_PER_CHUNK,
    )
    return 1


def restore_multimodal(config: Any, as_asked: Any) -> None:
    """A connector that can receive makes vLLM accept embeddings, also incomplete ones, from the outside: put it
    back."""
    ours = config.model_config.multimodal_config
    users = as_asked.model_config.multimodal_config
    if ours is None or users is None:
        return
    ours.enable_mm_embeds = users.enable_mm_embeds
    ours.allow_missing_mm_embeddings = users.allow_missing_mm_embeddings


def leave_alone(reason: str, message: str, config: Any = None, socket_path: str = "") -> None:
    """One line for the log, and for the node's daemons while this engine lives. Never raises, never waits.

    An inert connector calls it too, with the socket of its configuration; else it is the environment's."""
    logger.warning("kvoffload: this engine runs without offload: %s: %s", reason, message)
    try:
        tell_daemon(reason, message, config, socket_path or os.environ[SOCKET_VARIABLE])
    except Exception as error:  # noqa: BLE001 - as in register
        logger.info("kvoffload: the node daemon cannot be told: %s: %s", type(error).__name__, error)


_telling: "list[Connector]" = []
"""What tells why; kept, so that the status shows this engine while it lives, also after a restart of the daemon."""


def tell_daemon(reason: str, message: str, config: Any, socket_path: str) -> None:
    """Begin to tell the daemon why, in a thread of the connector's own, whenever there is a daemon that listens."""
    from kvoffload.protocol.client import Connector
    from kvoffload.protocol.messages import LEFT_ALONE_PREFIX, PROTOCOL_VERSION, Hello, Report

    hello = Hello(
        protocol_min=PROTOCOL_VERSION,
        protocol_max=PROTOCOL_VERSION,
        engine_id=f"{LEFT_ALONE_PREFIX}{uuid.uuid4()}",
        role="scheduler",
        rank=-1,
        world_size=1,
        identity=bytes(32),
        reason=reason[:256],
        message=message[:8192],
        model=str(config.model_config.model)[-256:] if config is not None else "",
        agent_version=__version__,
        process=os.urandom(16),
    )
    connector = Connector(
        socket_path,
        make_hello=lambda: hello,
        on_connected=lambda session: session.send(Report(note=f"{reason}: {message}"[:8192])),
        on_readable=lambda session: session.receive(),
        on_event=lambda line: logger.info("kvoffload: %s", line),
    )
    _telling.append(connector)
    connector.start()
