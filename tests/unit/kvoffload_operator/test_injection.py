"""What the webhook does with a pod (cases 5, 23 to 25); each patch is applied and looked at."""

import copy
import dataclasses
import json
from typing import Any

import pytest

from golden_files import assert_golden
from kvoffload.api.keys import (
    INJECTED_ANNOTATION,
    MOUNT_PATH,
    REPLICATED_LAYOUT_ANNOTATION,
    SAFE_TO_EVICT_ANNOTATION,
    SKIP_REASON_ANNOTATION,
    WEBHOOK_REPLICA_ANNOTATION,
    WEIGHTS_ID_ANNOTATION,
    SkipReason,
)
from kvoffload_operator.webhook.injection import Outcome, PoolFacts, inject
from kvoffload_operator.webhook.limits import MAX_ANNOTATION_BYTES
from operator_builders import pod_manifest, spec_of

DEEPSEEK = ["vllm", "serve", "deepseek-ai/DeepSeek-V3", "-tp", "8"]


def facts(namespace: str = "team", labels: dict[str, str] | None = None, **spec: Any) -> PoolFacts:
    return PoolFacts(
        name="main",
        spec=spec_of(**spec),
        namespace=namespace,
        namespace_labels=labels or {},
        operator_namespace="kvoffload-system",
    )


def apply_patch(pod: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """RFC 6902 for the operations that we use; a path that is not there raises, as the API server's would."""
    result: dict[str, Any] = copy.deepcopy(pod)
    for operation in outcome.operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        target: Any = result
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if isinstance(target, list):
            if operation["op"] == "add":
                index = len(target) if last == "-" else int(last)
                assert 0 <= index <= len(target), operation
                target.insert(index, operation["value"])
            else:
                target[int(last)] = operation["value"]
        else:
            assert operation["op"] == "add" or last in target, operation
            target[last] = operation["value"]
    return result


def env_of(pod: dict[str, Any], container: int = 0) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in pod["spec"]["containers"][container]["env"]}


def injected(pod: dict[str, Any], given: PoolFacts | None = None) -> dict[str, Any]:
    outcome = inject(pod, given or facts())
    assert outcome.skip_reason is None, outcome.message
    return apply_patch(pod, outcome)


# --- case 23 ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (None, ["--model", "deepseek-ai/DeepSeek-V3", "--tensor-parallel-size=8"]),
        (["vllm", "serve", "deepseek-ai/DeepSeek-V3"], ["--tensor-parallel-size", "8"]),
        (["sh", "-c", 'exec vllm serve deepseek-ai/DeepSeek-V3 -tp 8 "$@"'], None),
        (["vllm", "serve", "deepseek-ai/DeepSeek-V3", "-tp", "8", "--x", '{"a b": "it\'s"}'], None),
    ],
)
def test_case_23_every_way_to_start_vllm_is_injected_alike(command: list[str] | None, args: list[str] | None) -> None:
    before = pod_manifest(command=command, args=args)
    after = injected(before)
    container = after["spec"]["containers"][0]
    assert container.get("command") == command
    assert container.get("args") == args
    assert env_of(after) == {
        "PYTHONPATH": MOUNT_PATH,
        "PYTHONHASHSEED": "0",
        "KVOFFLOAD_SOCKET": "/run/kvoffload/daemon.sock",
        "KVOFFLOAD_POOL": "main",
        "KVOFFLOAD_REPLICATED_LAYOUT": "replicated",
    }


def test_case_23_a_launcher_script_is_injected_and_left_to_the_engine() -> None:
    after = injected(pod_manifest(command=["/launch.sh"], image="me/llm:1"))
    assert env_of(after)["KVOFFLOAD_REPLICATED_LAYOUT"] == "auto"
    assert after["metadata"]["annotations"][REPLICATED_LAYOUT_ANNOTATION].startswith("auto (UnknownModel: ")


# --- case 24 ----------------------------------------------------------------------------


def test_a_bare_pod_gets_one_volume_one_read_only_mount_and_a_preference() -> None:
    after = injected(pod_manifest(command=DEEPSEEK))
    assert after["spec"]["volumes"] == [{"name": "kvoffload", "emptyDir": {}}]
    assert after["spec"]["containers"][0]["volumeMounts"] == [
        {"name": "kvoffload", "mountPath": MOUNT_PATH, "readOnly": True}
    ]
    preference = after["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preference[0]["preference"]["matchExpressions"][0]["key"] == "pool.kvoffload.io/main"
    assert "required" not in json.dumps(after["spec"]["affinity"])
    assert "resources" not in after["spec"]["containers"][0]


def everything() -> dict[str, Any]:
    """A pod with something of everything that is injected."""
    return pod_manifest(
        command=DEEPSEEK,
        annotations={"kvoffload.io/weights-id": "w1", "mine": "x"},
        container={
            "env": [
                {"name": "A", "value": "1"},
                {"name": "PYTHONPATH", "value": "/mine:$(A)"},
                {"name": "PYTHONHASHSEED", "value": "7"},
                {"name": "VLLM_PLUGINS", "value": "a,b"},
            ],
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        },
        volumes=[{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        affinity={
            "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]}
        },
    )


def twice() -> list[dict[str, str]]:
    """Variables that stand there twice, which the API server warns of and takes; the kubelet takes the last one."""
    return [
        {"name": "PYTHONPATH", "value": "/first"},
        {"name": "VLLM_PLUGINS", "value": "first"},
        {"name": "PYTHONPATH", "value": "/last"},
        {"name": "VLLM_PLUGINS", "value": "last"},
    ]


@pytest.mark.parametrize(
    "pod",
    [
        pod_manifest(command=DEEPSEEK),
        everything(),
        pod_manifest(
            command=DEEPSEEK, container={"env": [{"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {}}}]}
        ),
        pod_manifest(command=DEEPSEEK, container={"env": []}, volumes=[], affinity={}),
        pod_manifest(command=DEEPSEEK, container={"env": twice()}),
        pod_manifest(command=DEEPSEEK, nodeName="n"),
    ],
)
@pytest.mark.parametrize("attachment", ["Preferred", "Required"])
def test_case_24_the_second_call_changes_nothing(pod: dict[str, Any], attachment: str) -> None:
    given = facts(attachment=attachment)
    once = injected(pod, given)
    assert inject(once, given).operations == ()


def test_case_24_of_a_variable_that_stands_twice_the_last_one_is_changed() -> None:
    after = injected(pod_manifest(command=DEEPSEEK, container={"env": twice()}))
    environment = env_of(after)
    assert environment["PYTHONPATH"] == f"{MOUNT_PATH}:/last"
    assert environment["VLLM_PLUGINS"] == "last,kvoffload"
    assert after["spec"]["containers"][0]["env"][0]["value"] == "/first"


def test_case_24_the_user_s_values_stay() -> None:
    after = injected(everything())
    environment = env_of(after)
    assert environment["PYTHONPATH"] == f"{MOUNT_PATH}:/mine:$(A)"
    assert environment["PYTHONHASHSEED"] == "7"
    assert environment["VLLM_PLUGINS"] == "a,b,kvoffload"
    assert environment["KVOFFLOAD_WEIGHTS_ID"] == "w1"
    names = [one["name"] for one in after["spec"]["containers"][0]["env"]]
    assert names.index("A") < names.index("PYTHONPATH"), "a variable may only refer to earlier ones"
    assert after["metadata"]["annotations"]["mine"] == "x"
    assert after["spec"]["volumes"][0]["name"] == "shm"


def test_case_24_values_from_references_are_kept_under_another_name_and_referred_to() -> None:
    reference = {"configMapKeyRef": {"name": "c", "key": "k"}}
    pod = pod_manifest(
        command=DEEPSEEK,
        container={
            "env": [{"name": "PYTHONPATH", "valueFrom": reference}, {"name": "VLLM_PLUGINS", "valueFrom": reference}]
        },
    )
    after = injected(pod)
    environment = env_of(after)
    assert environment["KVOFFLOAD_USER_PYTHONPATH"] == reference
    assert environment["PYTHONPATH"] == f"{MOUNT_PATH}:$(KVOFFLOAD_USER_PYTHONPATH)"
    assert environment["VLLM_PLUGINS"] == "$(KVOFFLOAD_USER_VLLM_PLUGINS),kvoffload"
    names = [one["name"] for one in after["spec"]["containers"][0]["env"]]
    assert names.index("KVOFFLOAD_USER_PYTHONPATH") < names.index("PYTHONPATH")
    assert names.index("KVOFFLOAD_USER_VLLM_PLUGINS") < names.index("VLLM_PLUGINS")


def test_case_24_the_image_s_pythonpath_is_kept_where_the_annotation_names_it() -> None:
    pod = pod_manifest(command=DEEPSEEK, annotations={"kvoffload.io/image-pythonpath": "/opt/app"})
    assert env_of(injected(pod))["PYTHONPATH"] == f"{MOUNT_PATH}:/opt/app"


def test_env_from_is_refused_unless_the_annotation_says_what_it_sets() -> None:
    container = {"envFrom": [{"secretRef": {"name": "s"}}]}
    assert inject(pod_manifest(command=DEEPSEEK, container=container), facts()).skip_reason == (
        SkipReason.PYTHONPATH_FROM_REFERENCE
    )
    told = pod_manifest(command=DEEPSEEK, container=container, annotations={"kvoffload.io/image-pythonpath": ""})
    assert env_of(injected(told))["PYTHONPATH"] == MOUNT_PATH


def test_case_24_the_second_of_two_containers_is_found_and_the_first_untouched() -> None:
    pod = pod_manifest(command=DEEPSEEK)
    sidecar = {"name": "proxy", "image": "envoy:1", "command": ["envoy"]}
    pod["spec"]["containers"].insert(0, sidecar)
    after = injected(pod)
    assert after["spec"]["containers"][0] == sidecar
    assert env_of(after, 1)["KVOFFLOAD_POOL"] == "main"


def test_the_annotation_chooses_among_several() -> None:
    pod = pod_manifest(command=DEEPSEEK)
    pod["spec"]["containers"].append({"name": "other", "image": "vllm/vllm-openai:v0.32.0", "command": DEEPSEEK})
    assert inject(pod, facts()).skip_reason is SkipReason.AMBIGUOUS_CONTAINER
    pod["metadata"]["annotations"] = {"kvoffload.io/container": "other"}
    assert "env" not in injected(pod)["spec"]["containers"][0]
    pod["metadata"]["annotations"] = {"kvoffload.io/container": "nobody"}
    assert inject(pod, facts()).skip_reason is SkipReason.NO_VLLM_CONTAINER


@pytest.mark.parametrize(
    ("named", "wanted"),
    [(None, "kvoffload"), ("", "kvoffload"), ("a,b", "a,b,kvoffload"), ("a,kvoffload,b", "a,kvoffload,b")],
)
def test_our_volume_keeps_no_autoscaler_from_removing_a_node_and_the_user_s_are_named_as_before(
    named: str | None, wanted: str
) -> None:
    given = {} if named is None else {SAFE_TO_EVICT_ANNOTATION: named}
    after = injected(pod_manifest(command=DEEPSEEK, annotations=given))
    assert after["metadata"]["annotations"][SAFE_TO_EVICT_ANNOTATION] == wanted


def test_a_pod_that_is_left_alone_says_nothing_to_the_autoscaler() -> None:
    outcome = inject(pod_manifest(command=DEEPSEEK), facts(mode="Paused"))
    assert SAFE_TO_EVICT_ANNOTATION not in json.dumps(outcome.operations).replace("~1", "/")


def test_required_attachment_adds_its_label_to_every_alternative() -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    pod = pod_manifest(
        command=DEEPSEEK,
        affinity={"nodeAffinity": {required: {"nodeSelectorTerms": [term, {"matchFields": []}]}}, "podAffinity": {}},
    )
    after = injected(pod, facts(attachment="Required"))
    terms = after["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    assert [one["matchExpressions"][-1]["key"] for one in terms] == ["pool.kvoffload.io/main"] * 2
    assert terms[0]["matchExpressions"][0] == term["matchExpressions"][0]
    assert after["spec"]["affinity"]["podAffinity"] == {}


def test_a_pod_bound_to_a_node_gets_no_affinity() -> None:
    assert "affinity" not in injected(pod_manifest(command=DEEPSEEK, nodeName="n"))["spec"]


# --- case 25, case 5 ----------------------------------------------------------------------------


def own_volume(*mount_paths: str) -> dict[str, Any]:
    """A pod with an emptyDir of its own that has our volume's name."""
    mounts = [{"name": "kvoffload", "mountPath": path} for path in mount_paths]
    return pod_manifest(
        command=DEEPSEEK, container={"volumeMounts": mounts}, volumes=[{"name": "kvoffload", "emptyDir": {}}]
    )


@pytest.mark.parametrize(
    ("pod", "given", "reason"),
    [
        (pod_manifest(command=[*DEEPSEEK, "--kv-transfer-config", "{}"]), facts(), SkipReason.USER_CONNECTOR),
        (pod_manifest(command=DEEPSEEK, image="vllm/vllm-openai:v0.20.0"), facts(), SkipReason.UNSUPPORTED_VLLM),
        (pod_manifest(command=DEEPSEEK), facts("kube-system"), SkipReason.NAMESPACE_NOT_ALLOWED),
        (pod_manifest(command=DEEPSEEK), facts("kvoffload-system"), SkipReason.NAMESPACE_NOT_ALLOWED),
        (
            pod_manifest(command=DEEPSEEK),
            facts(namespaceSelector={"matchLabels": {"gpu": "yes"}}),
            SkipReason.NAMESPACE_NOT_ALLOWED,
        ),
        (pod_manifest(command=DEEPSEEK), facts(mode="Paused"), SkipReason.POOL_PAUSED),
        (pod_manifest(command=DEEPSEEK), facts(mode="Observe"), SkipReason.POOL_OBSERVED),
        (pod_manifest(command=["nginx"], image="nginx"), facts(), SkipReason.NO_VLLM_CONTAINER),
        (pod_manifest(command=[*DEEPSEEK, "--nnodes", "2", "--node-rank", "1"]), facts(), SkipReason.MULTI_NODE),
        (
            pod_manifest(command=DEEPSEEK, volumes=[{"name": "kvoffload", "configMap": {"name": "x"}}]),
            facts(),
            SkipReason.NAME_CONFLICT,
        ),
        (own_volume("/cache"), facts(), SkipReason.NAME_CONFLICT),
        (own_volume(MOUNT_PATH), facts(), SkipReason.NAME_CONFLICT),
        (own_volume(), facts(), SkipReason.NAME_CONFLICT),
        (
            pod_manifest(command=DEEPSEEK, container={"volumeMounts": [{"name": "x", "mountPath": "/run/kvoffload/"}]}),
            facts(),
            SkipReason.NAME_CONFLICT,
        ),
        (
            pod_manifest(command=DEEPSEEK, container={"volumeDevices": [{"name": "x", "devicePath": MOUNT_PATH}]}),
            facts(),
            SkipReason.NAME_CONFLICT,
        ),
        (
            pod_manifest(command=DEEPSEEK, annotations={"a": "x" * ((256 << 10) - 100)}),
            facts(),
            SkipReason.POD_TOO_LARGE,
        ),
        (
            pod_manifest(command=DEEPSEEK, annotations={WEIGHTS_ID_ANNOTATION: "x" * (128 << 10)}),
            facts(),
            SkipReason.POD_TOO_LARGE,
        ),
    ],
)
def test_case_25_a_pod_that_is_left_alone_differs_by_its_reason_only(
    pod: dict[str, Any], given: PoolFacts, reason: SkipReason
) -> None:
    outcome = inject(pod, given)
    assert outcome.skip_reason is reason
    assert outcome.message
    after = apply_patch(pod, outcome)
    assert after["spec"] == pod["spec"]
    assert after["metadata"]["annotations"][SKIP_REASON_ANNOTATION] == reason
    assert INJECTED_ANNOTATION not in after["metadata"]["annotations"]
    assert inject(after, given).operations == (), "reinvocation changes nothing"


@pytest.mark.parametrize("change", [{"mountPath": "/cache"}, {"subPath": "below"}])
def test_an_injected_pod_whose_mount_was_moved_is_no_longer_called_injected(change: dict[str, str]) -> None:
    pod = injected(pod_manifest(command=DEEPSEEK))
    pod["spec"]["containers"][0]["volumeMounts"][0] |= change
    assert inject(pod, facts()).skip_reason is SkipReason.NAME_CONFLICT


DOUBLING = ["sh", "-c", "A=aaaaaaaa;" + "A=$A$A;" * 40 + "vllm serve $A -tp 8"]


def test_a_command_line_that_grows_beyond_measure_is_injected_and_left_to_the_engine() -> None:
    outcome = inject(pod_manifest(command=DOUBLING), facts())
    assert "more than 524288 characters" in outcome.unread
    assert "shorter script" in outcome.unread
    assert outcome.prediction is not None
    assert outcome.prediction.annotation.startswith("auto (UnknownModel: the pod's command lines come to more than")
    assert env_of(apply_patch(pod_manifest(command=DOUBLING), outcome))["KVOFFLOAD_REPLICATED_LAYOUT"] == "auto"


def test_containers_share_what_is_read_of_a_pod() -> None:
    long = ["sh", "-c", f"echo {'x' * (120 << 10)}"]
    pod = pod_manifest(command=DEEPSEEK)
    pod["spec"]["containers"] = [
        *({"name": f"c{number}", "image": "i", "command": long} for number in range(2)),
        *pod["spec"]["containers"],
    ]
    assert inject(pod, facts()).unread, "each is expanded by the kubelet, split, and expanded by the shell: 720 KiB"
    del pod["spec"]["containers"][0]
    assert not inject(pod, facts()).unread


def annotation_bytes(pod: dict[str, Any]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in pod["metadata"]["annotations"].items())


@pytest.mark.parametrize("given", [facts(), facts(mode="Observe"), facts(mode="Paused")], ids=["", "observe", "paused"])
def test_annotations_never_pass_what_the_api_server_takes(given: PoolFacts) -> None:
    seen = set()
    for free_bytes in range(0, 400, 7):  # of three-byte characters
        value = "\u20ac" * ((MAX_ANNOTATION_BYTES - 1 - free_bytes) // 3)
        pod = pod_manifest(command=DEEPSEEK, annotations={"a": value})
        outcome = inject(pod, given)
        seen.add((outcome.skip_reason, bool(outcome.operations)))
        # the mark of the second replica comes on top
        replica = len(WEBHOOK_REPLICA_ANNOTATION) + 1 if outcome.operations else 0
        assert annotation_bytes(apply_patch(pod, outcome)) + replica <= MAX_ANNOTATION_BYTES
    assert (inject(pod_manifest(command=DEEPSEEK), given).skip_reason, True) in seen
    assert any(not patched for _, patched in seen)


def test_a_pod_that_etcd_may_refuse_with_our_part_gets_none() -> None:
    filler = [{"name": f"V{number}", "value": "x" * 10_000} for number in range(100)]
    fits = pod_manifest(command=DEEPSEEK, container={"env": filler})
    assert inject(fits, facts()).skip_reason is None
    outcome = inject(pod_manifest(command=DEEPSEEK, container={"env": filler + filler[:5]}), facts())
    assert (outcome.skip_reason, outcome.operations) == (SkipReason.POD_TOO_LARGE, ())


def test_case_25_a_pool_that_does_not_exist_leaves_the_pod_alone() -> None:
    nowhere = PoolFacts("main", None, "team", {}, "kvoffload-system")
    assert inject(pod_manifest(command=DEEPSEEK), nowhere).skip_reason is SkipReason.POOL_NOT_FOUND


def test_a_namespace_that_the_selector_selects_may_attach() -> None:
    given = facts("kube-system", {"gpu": "yes"}, namespaceSelector={"matchLabels": {"gpu": "yes"}})
    assert inject(pod_manifest(command=DEEPSEEK), given).skip_reason is None


def test_mode_observe_tells_what_would_have_been() -> None:
    pod = pod_manifest(command=DEEPSEEK)
    after = apply_patch(pod, inject(pod, facts(mode="Observe")))
    assert after["metadata"]["annotations"][REPLICATED_LAYOUT_ANNOTATION].startswith("replicated (Replicated: ")


def test_the_pool_s_veto_reaches_the_engine() -> None:
    after = injected(pod_manifest(command=DEEPSEEK), facts(replicatedLayout="Never"))
    assert env_of(after)["KVOFFLOAD_REPLICATED_LAYOUT"] == "per-rank"


@pytest.mark.parametrize(
    ("name", "pod"),
    [("bare", pod_manifest(command=DEEPSEEK)), ("everything", everything())],
)
def test_the_patch_is_as_pinned(name: str, pod: dict[str, Any]) -> None:
    operations = inject(pod, facts()).operations
    assert_golden(json.dumps(operations, indent=1) + "\n", f"operator/patch-{name}.json")


def test_the_administrators_step_deadline_is_injected_where_the_user_set_none() -> None:
    given = dataclasses.replace(facts(), step_deadline_seconds=0.02)
    assert env_of(injected(pod_manifest(command=DEEPSEEK), given))["KVOFFLOAD_STEP_DEADLINE_SECONDS"] == "0.02"
    own = [{"name": "KVOFFLOAD_STEP_DEADLINE_SECONDS", "value": "0.5"}]
    pod = injected(pod_manifest(command=DEEPSEEK, container={"env": own}), given)
    assert env_of(pod)["KVOFFLOAD_STEP_DEADLINE_SECONDS"] == "0.5"
    assert "KVOFFLOAD_STEP_DEADLINE_SECONDS" not in env_of(injected(pod_manifest(command=DEEPSEEK)))
