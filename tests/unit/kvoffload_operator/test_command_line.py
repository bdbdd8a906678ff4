"""vLLM's arguments from manifests (case 23), and never an exception whatever a manifest holds."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_operator.webhook.command_line import CommandLine, Launch, parse_command_line

VLLM_IMAGE = "vllm/vllm-openai:v0.32.0"


def parse(
    command: list[str] | None = None,
    args: list[str] | None = None,
    env: dict[str, str | None] | None = None,
    image: str = "registry.example/llm:1",
) -> CommandLine:
    return parse_command_line(command or [], args or [], env or {}, image)


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (["vllm", "serve", "x"], ["-tp", "8"]),
        (["vllm", "serve"], ["x", "--tensor-parallel-size=8"]),
        (["/opt/venv/bin/vllm", "serve", "x", "--tensor_parallel_size", "8"], []),
        (["vllm", "serve", "x", "-tp=8"], []),
        (["vllm", "serve", "x", "--tensor-parallel", "8"], []),
        (["vllm", "serve", "x", "-tp", "4", "--tensor-parallel-size", "8"], []),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "x", "-tp", "8"], []),
        (["python", "-u", "-m", "vllm.entrypoints.openai.api_server"], ["--model=x", "--tensor-parallel-size", "8"]),
        (["sh", "-c", 'exec vllm serve x -tp 8 "$@"'], []),
        (["sh", "-c", 'exec vllm serve x "$@"'], ["sh", "-tp", "8"]),
        (["bash", "-lc"], ["vllm serve x --tensor-parallel-size 8"]),
        (["/bin/bash", "-euo", "pipefail", "-c", "export A=1; sleep 1 && \\\n vllm serve x \\\n -tp 8"], []),
        (["sh", "-c", "exec vllm serve x -tp $TP"], []),
        (["sh", "-c", "exec vllm serve x -tp ${TP}"], []),
        (["sh", "-c", 'N=8; exec vllm serve x -tp "$N" > /tmp/log 2>&1'], []),
        (["sh", "-c", "exec vllm serve x -tp $(TP)"], []),
        (["vllm", "serve", "x", "--tensor-parallel-size", "$(TP)"], []),
        (["env", "A=1", "vllm", "serve", "x", "-tp", "8"], []),
        (["numactl", "--cpunodebind=0", "vllm", "serve", "x", "-tp", "8"], []),
        (["tini", "--", "vllm", "serve", "x", "-tp", "8"], []),
        (["sh", "-c", "echo start; # vllm serve y -tp 2\nvllm serve x -tp 8"], []),
        (["sh", "-c", "bash -c 'vllm serve x -tp 8'"], []),
        (["vllm", "serve", "x", "--speculative-config", '{"method": "ngram", "a b": "-tp 3"}', "-tp", "8"], []),
    ],
)
def test_tensor_parallel_size_is_found_in_every_spelling(command: list[str], args: list[str]) -> None:
    line = parse(command, args, {"TP": "8"})
    assert line.launch is Launch.VLLM
    assert line.number("tensor-parallel-size", 1) == 8
    assert line.text("model") == "x"


def test_arguments_alone_belong_to_the_image_s_server() -> None:
    line = parse(args=["--model", "x", "--tensor-parallel-size=8"], image=VLLM_IMAGE)
    assert line.launch is Launch.IMAGE
    assert line.number("tensor-parallel-size", 1) == 8
    assert line.text("model") == "x"


def test_arguments_of_an_unknown_image_are_not_taken_for_vllm() -> None:
    assert parse(args=["--model", "x", "-tp", "8"]).launch is Launch.UNKNOWN


@pytest.mark.parametrize(
    ("command", "env"),
    [
        (["vllm", "serve", "x", "-tp", "$(TP)"], {"TP": None}),
        (["sh", "-c", "vllm serve x -tp $TP"], {}),
        (["sh", "-c", "vllm serve x -tp $TP"], {"TP": None}),
        (["sh", "-c", "vllm serve x -tp ${TP:-8}"], {}),
        (["sh", "-c", "vllm serve x -tp $(nvidia-smi -L | wc -l)"], {}),
        (["sh", "-c", "vllm serve x -tp `nproc`"], {}),
        (["vllm", "serve", "x", "--config", "/etc/vllm.yaml"], {}),
        (["/launch.sh", "x"], {}),
        (["sh", "-c", "/launch.sh"], {}),
        (["sh", "/launch.sh"], {}),
        (["sh", "-c", "vllm serve 'unbalanced"], {}),
    ],
)
def test_what_cannot_be_told_is_unknown_and_not_one(command: list[str], env: dict[str, str | None]) -> None:
    assert parse(command, [], env).number("tensor-parallel-size", 1) is None


def test_a_default_of_the_shell_is_used_where_the_variable_is_set_and_empty() -> None:
    assert parse(["sh", "-c", "vllm serve x -tp ${TP:-8}"], env={"TP": ""}).number("tensor-parallel-size", 1) == 8


def test_an_option_that_is_not_given_has_its_default_only_where_all_are_known() -> None:
    assert parse(["vllm", "serve", "x"]).number("tensor-parallel-size", 1) == 1
    assert parse(["vllm", "serve", "x", "--config", "f"]).number("tensor-parallel-size", 1) is None


def test_case_5_several_nodes_are_seen() -> None:
    line = parse(["vllm", "serve", "x"], ["--tensor-parallel-size", "8", "--nnodes", "2", "--node-rank", "1"])
    assert (line.number("nnodes", 1), line.number("node-rank", 0)) == (2, 1)


def test_a_connector_of_the_user_s_is_seen_in_dotted_form_too() -> None:
    assert parse(["vllm", "serve", "x", "--kv-transfer-config", '{"kv_connector": "A B"}']).has("kv-transfer-config")
    assert parse(["vllm", "serve", "x", "--kv-transfer-config.kv_connector", "A"]).has("kv-transfer-config")
    assert not parse(["vllm", "serve", "x"]).has("kv-transfer-config")


def test_leader_worker_set_s_ray_script_is_recognized() -> None:
    line = parse(
        [
            "sh",
            "-c",
            "bash /vllm-workspace/examples/online_serving/multi-node-serving.sh leader "
            "--ray_cluster_size=$(LWS_GROUP_SIZE); python3 -m vllm.entrypoints.openai.api_server --port 8080 "
            "--model meta-llama/Llama-3.1-405B-Instruct --tensor-parallel-size 8 --pipeline_parallel_size 2",
        ],
        env={"LWS_GROUP_SIZE": "2"},
    )
    assert line.launch is Launch.VLLM
    assert line.uses_ray
    assert line.number("pipeline-parallel-size", 1) == 2


def test_kserve_s_arguments_are_read() -> None:
    line = parse(
        args=["--model=/mnt/models", "--served-model-name=x", "-tp=2"], image="kserve/huggingfaceserver-vllm:1"
    )
    assert line.text("model") == "/mnt/models"
    assert line.number("tensor-parallel-size", 1) == 2


@pytest.mark.parametrize("command", [["sleep", "infinity"], ["nginx"], ["sh", "-c", "vllm bench serve --model x"]])
def test_other_programs_are_not_vllm(command: list[str]) -> None:
    assert parse(command).launch is not Launch.VLLM


@pytest.mark.parametrize("script", ['vllm serve ${M-"x"}', "vllm serve ${M-${M-${M-'x'}}}"])
def test_a_default_with_quotes_in_it_is_unknown(script: str) -> None:
    line = parse(["sh", "-c", script], env={"M": "y"})
    assert (line.launch, line.options) == (Launch.VLLM, {"model": None})


def test_quotes_nested_beyond_reason_are_not_split() -> None:
    assert parse(["sh", "-c", '"$(' * 2000 + ')"' * 2000]).launch is Launch.UNKNOWN


words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40)
values = st.dictionaries(st.sampled_from(["TP", "MODEL", "A"]), st.none() | words, max_size=3)


@given(st.lists(words, max_size=8), st.lists(words, max_size=8), values, words)
def test_no_manifest_makes_it_raise(
    command: list[str], args: list[str], env: dict[str, str | None], image: str
) -> None:
    parse_command_line(command, args, env, image)


@given(st.text(alphabet="vlm serve-tp8=$(){}\"'\\;&|`#\n", max_size=200), values)
def test_no_script_makes_it_raise(script: str, env: dict[str, str | None]) -> None:
    parse_command_line(["sh", "-c", script], [], env)


safe = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\x00"), min_size=1, max_size=30
)


@given(safe, st.integers(1, 512), safe)
def test_a_quoted_script_says_the_same_as_the_plain_command(model: str, size: int, extra: str) -> None:
    argv = ["vllm", "serve", f"m{model}", "--some-option", f"v{extra}", "--tensor-parallel-size", str(size)]
    plain = parse([word.replace("$", "$$") for word in argv])
    script = parse(["sh", "-c", shlex.join(argv).replace("$", "$$")])
    assert plain.options == script.options == {"model": f"m{model}", "tensor-parallel-size": str(size)}
