"""Third-party clients against the server, each where it is installed: the table in docs/clients.md.

With XLSTM7B_CLIENT_TABLE=FILE, the rows of the features that work are written to FILE. JavaScript
clients are tried if XLSTM7B_NODE_MODULES names a folder with `ai`, `@ai-sdk/openai`,
`@ai-sdk/openai-compatible`, `openai` and `zod`.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
import pytest
from live_server import LiveServer, serving
from pydantic import BaseModel
from tool_chats import tool_format, tool_generator

USER = [{"role": "user", "content": "Hi"}]
INTEGER = {"type": "integer"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": INTEGER, "b": INTEGER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FUNCTION = {"name": "add", "description": "The sum of two numbers", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
THREES = {"a": 3, "b": 3}
OPENAI, LANGCHAIN = "openai (Python)", "langchain-openai"
LLAMA, LITELLM, LLM = "llama-index-llms-openai-like", "litellm", "llm"
SDK_CHAT, SDK_RESPONSES = "@ai-sdk/openai chat", "@ai-sdk/openai responses"
SDK_COMPATIBLE = "@ai-sdk/openai-compatible"
DOCS = Path(__file__).parents[2] / "docs" / "clients.md"
NODE_MODULES = os.environ.get("XLSTM7B_NODE_MODULES")

WORKING: dict[tuple[str, str], str] = {}  # versions by client and feature


class Pet(BaseModel):
    """A pet."""

    legs: int


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A model that answers "@ok" without tools, calls add(3, 3) if it can, then answers "ok"."""
    with serving(tool_generator(), chat_format=tool_format()) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    path = os.environ.get("XLSTM7B_CLIENT_TABLE")
    if path is not None:
        rows = [f"| {client} | {number} | {feature} | works |\n"
                for (client, feature), number in WORKING.items()]  # fmt: skip
        Path(path).write_text("".join(rows), encoding="utf-8")


Check = Callable[[str], None]
FEATURES: list[tuple[str, str, Check]] = []


def feature(client: str, name: str) -> Callable[[Check], None]:
    """Makes a row of the table from a function that takes the server's URL."""
    return lambda check: FEATURES.append((client, name, check))


# openai for Python


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@feature(OPENAI, "completions, chats and their streams")
def _(url: str) -> None:
    with client_of(url) as client:
        chat = client.chat.completions
        assert client.completions.create(model="tiny", prompt="Hi?").choices[0].text == "@ok"
        done = chat.create(model="tiny", messages=USER)
        assert done.choices[0].message.content == "@ok"
        chunks = chat.create(model="tiny", messages=USER, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "@ok"


@feature(OPENAI, "tools, with `stream` and with results")
def _(url: str) -> None:
    with client_of(url) as client:
        options = {"model": "tiny", "tools": TOOLS}
        with client.chat.completions.stream(messages=USER, **options) as stream:
            message = stream.get_final_completion().choices[0].message
        (call,) = message.tool_calls
        assert call.function.parsed_arguments == THREES
        result = {"role": "tool", "tool_call_id": call.id, "content": "6"}
        done = client.chat.completions.create(messages=[*USER, message, result], **options)
        assert done.choices[0].message.content == "ok"


@feature(OPENAI, "`chat.completions.parse` of a pydantic class")
def _(url: str) -> None:
    with client_of(url) as client:
        done = client.chat.completions.parse(model="tiny", messages=USER, response_format=Pet)
        assert done.choices[0].message.parsed == Pet(legs=3)


@feature(OPENAI, "`responses.create`, `.stream` and `.parse`, tools, `previous_response_id`")
def _(url: str) -> None:
    with client_of(url) as client:
        options = {"model": "tiny", "tools": [{"type": "function", "strict": True, **FUNCTION}]}
        first = client.responses.create(input="Hi", **options)
        (call,) = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "6"}
        more = {"input": [result], "previous_response_id": first.id, **options}
        with client.responses.stream(**more) as stream:
            assert stream.get_final_response().output_text == "ok"
        parsed = client.responses.parse(model="tiny", input="Hi", text_format=Pet)
        assert parsed.output_parsed == Pet(legs=3)


# LangChain


def langchain(url: str, *, responses: bool) -> tuple[Any, Any]:
    pytest.importorskip("langchain_openai")
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """The sum of two numbers"""
        return a + b

    options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    return ChatOpenAI(model="tiny", use_responses_api=responses, **options), add


@feature(LANGCHAIN, "`invoke` and `stream`")
def _(url: str) -> None:
    for responses in (False, True):
        model, _ = langchain(url, responses=responses)
        assert model.invoke("Hi").text == "@ok"
        assert "".join(chunk.text for chunk in model.stream("Hi")) == "@ok"


@feature(LANGCHAIN, "`bind_tools`: auto, any, named, streamed, with results")
def _(url: str) -> None:
    for responses in (False, True):
        model, add = langchain(url, responses=responses)
        from langchain_core.messages import HumanMessage, ToolMessage

        bound = model.bind_tools([add])
        message = bound.invoke("Hi")
        assert message.tool_calls[0]["args"] == THREES
        results = [
            ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
            for call in message.tool_calls
        ]
        asked = [HumanMessage("Hi"), message, *results]
        assert bound.invoke(asked).text == "ok"
        first, *others = bound.stream("Hi")
        for chunk in others:
            first += chunk
        assert first.tool_calls[0]["args"] == THREES
        for choice in ("any", "add"):
            forced = model.bind_tools([add], tool_choice=choice).invoke(asked)
            assert forced.tool_calls[0]["args"] == THREES


@feature(LANGCHAIN, "`with_structured_output`: `json_schema` and `function_calling`")
def _(url: str) -> None:
    for responses in (False, True):
        model, _ = langchain(url, responses=responses)
        for method in ("json_schema", "function_calling"):
            assert model.with_structured_output(Pet, method=method).invoke("Hi") == Pet(legs=3)


# llama-index


def llama_index(url: str) -> tuple[Any, Any]:
    pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def add(a: int, b: int) -> int:
        """The sum of two numbers"""
        return a + b

    model = OpenAILike(
        model="tiny", api_base=f"{url}/v1", api_key="none", max_retries=0, context_window=4096,
        is_chat_model=True, is_function_calling_model=True,
    )  # fmt: skip
    return model, FunctionTool.from_defaults(fn=add)


@feature(LLAMA, "`complete`, `stream_complete` and structured output")
def _(url: str) -> None:
    model, _ = llama_index(url)
    assert model.complete("Hi").text == "@ok"
    assert "".join(piece.delta for piece in model.stream_complete("Hi")) == "@ok"
    assert model.as_structured_llm(Pet).complete("Hi").raw == Pet(legs=3)


@feature(LLAMA, "`chat_with_tools`, `predict_and_call` and `FunctionAgent`")
def _(url: str) -> None:
    model, add = llama_index(url)
    from llama_index.core.agent.workflow import FunctionAgent

    answer = model.chat_with_tools([add], user_msg="Hi", tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("add", THREES)
    assert model.predict_and_call([add], "Hi").response == "6"

    async def run() -> str:
        return str(await FunctionAgent(tools=[add], llm=model).run("Hi"))

    assert asyncio.run(run()) == "ok"


# litellm


def litellm_options(url: str) -> tuple[Any, dict[str, Any]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
    litellm = pytest.importorskip("litellm")
    return litellm, {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}


@feature(LITELLM, "`completion`, `text_completion` and `responses`")
def _(url: str) -> None:
    litellm, options = litellm_options(url)
    for name in ("openai/tiny", "hosted_vllm/tiny"):
        done = litellm.completion(model=name, messages=USER, **options)
        assert done.choices[0].message.content == "@ok"
    text = litellm.text_completion(model="text-completion-openai/tiny", prompt="Hi?", **options)
    assert text.choices[0].text == "@ok"
    answer = litellm.responses(model="openai/tiny", input="Hi", **options)
    assert answer.output[0].content[0].text == "@ok"


@feature(LITELLM, "tools, streamed and with results")
def _(url: str) -> None:
    litellm, options = litellm_options(url)
    pytest.importorskip("mcp")  # which litellm needs for any tools
    options |= {"model": "openai/tiny", "tools": TOOLS}
    message = litellm.completion(messages=USER, **options).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == THREES
    result = {"role": "tool", "tool_call_id": call.id, "content": "6"}
    done = litellm.completion(messages=[*USER, message, result], **options)
    assert done.choices[0].message.content == "ok"
    chunks = list(litellm.completion(messages=USER, stream=True, **options))
    built = litellm.stream_chunk_builder(chunks).choices[0].message
    assert json.loads(built.tool_calls[0].function.arguments) == THREES


# Programs


def run(command: list[str], **environment: str) -> str:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def llm(url: str, *arguments: str) -> str:
    pytest.importorskip("llm")
    with TemporaryDirectory() as folder:
        described = (
            f"- {{model_id: tiny, model_name: tiny, api_base: '{url}/v1', "
            "supports_tools: true, supports_schema: true}\n"
        )
        (Path(folder) / "extra-openai-models.yaml").write_text(described)
        command = [sys.executable, "-m", "llm", "-m", "tiny", *arguments, "Hi"]
        return run(command, LLM_USER_PATH=folder, OPENAI_API_KEY="none").strip()


@feature(LLM, "prompts, `--no-stream` and `--schema`")
def _(url: str) -> None:
    assert llm(url) == llm(url, "--no-stream") == "@ok"
    assert json.loads(llm(url, "--schema", "legs int")) == {"legs": 3}


@feature(LLM, "`-T` and `--functions`")
def _(url: str) -> None:
    assert llm(url, "-T", "llm_version") == "ok"
    code = "def add(a: int, b: int) -> int:\n    'The sum'\n    return a + b"
    assert llm(url, "--functions", code, "--no-stream") == "ok"


@feature("guidellm", "a benchmark to its end, with chats")
def _(url: str) -> None:
    pytest.importorskip("guidellm")
    with TemporaryDirectory() as folder:
        data, report = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        row = json.dumps({"prompt": "Hi", "output_tokens_count": 8})
        data.write_text(f"{row}\n" * 4)
        command = [sys.executable, "-m", "guidellm", "run", "--disable-progress"]
        command += ["--backend", f"kind=openai_http,target={url},model=tiny"]
        command += ["--profile", "kind=concurrent,streams=2"]
        command += ["--constraint", "kind=max_requests,count=4"]
        command += ["--data", f"kind=json_file,path={data}"]
        run([*command, "--output", f"kind=json,path={report}"])
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (4, 0)


# JavaScript


@cache
def node_results(url: str) -> dict[str, dict[str, Any]]:
    node = shutil.which("node")
    if node is None or NODE_MODULES is None:
        pytest.skip("needs node, and XLSTM7B_NODE_MODULES")
    with TemporaryDirectory() as folder:  # packages are looked for beside the script
        (Path(folder) / "node_modules").symlink_to(Path(NODE_MODULES).absolute())
        script = shutil.copy(Path(__file__).with_name("clients.mjs"), folder)
        found: dict[str, dict[str, Any]] = json.loads(run([node, str(script), url]))
        return found


def javascript(client: str, name: str, **wanted: Any) -> None:
    def check(url: str) -> None:
        found = node_results(url)[client.removesuffix(" (JavaScript)")]
        for key, value in wanted.items():
            assert found[key.replace("_", " ")] == value

    FEATURES.append((client, name, check))


for sdk in (SDK_CHAT, SDK_RESPONSES, SDK_COMPATIBLE):
    javascript(sdk, "`generateText` and `streamText`", text="@ok", stream="@ok")
    javascript(
        sdk, "tools, with `stopWhen` and `toolChoice`", tools="ok", streamed_tools="ok",
        required=THREES,
    )  # fmt: skip
    javascript(sdk, "`Output.object`", object={"legs": 3})
OPENAI_JS = "openai (JavaScript)"
javascript(OPENAI_JS, "chats and responses", text="@ok", responses="@ok", streamed_responses="@ok")
javascript(OPENAI_JS, "`runTools`, whole and streamed", tools="ok", streamed_tools="ok")


def version_of(client: str) -> str:
    package = client.partition(" ")[0]
    if package.startswith("@") or client == OPENAI_JS:
        described = json.loads((Path(NODE_MODULES or "") / package / "package.json").read_text())
        own = str(described["version"])
        if not package.startswith("@"):
            return own
        sdk_version = json.loads((Path(NODE_MODULES or "") / "ai" / "package.json").read_text())
        return f"{own}, ai {sdk_version['version']}"
    return version(package)


@pytest.mark.parametrize(
    ("client", "name", "check"), FEATURES, ids=[f"{client}: {name}" for client, name, _ in FEATURES]
)
def test_a_client(live: LiveServer, client: str, name: str, check: Check) -> None:
    check(live.url)
    WORKING[client, name] = version_of(client)


def test_the_table_in_the_docs_has_all_features() -> None:
    rows = [line.split(" | ") for line in DOCS.read_text().splitlines() if line.endswith("works |")]
    shown = [(row[0].removeprefix("| "), row[2]) for row in rows]
    assert shown == [(client, name) for client, name, _ in FEATURES]
