"""vLLM's V1 engine with the plugin, on a CPU, in the environment that `make test-vllm` creates.

The engines run in this process, except for the server with two processes.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: run make test-vllm")
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

from models import random_model
from vllm import LLM, EngineArgs, SamplingParams
from vllm.plugins import load_general_plugins

from xlstm7b import Generator, ModelConfig
from xlstm7b.quantize.config import Quantization
from xlstm7b.tokenizer import ByteTokenizer, write_tokenizer

CONFIG = ModelConfig(128, 3, 4, vocab_size=320)
LENGTHS = [1, 2, 3, 7, 16, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 300]
NEW_TOKENS = 24
# `vllm serve`. The program asks for the version of `vllm`, but on CPUs the package is `vllm-cpu`.
PROGRAM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    random_model(CONFIG, torch.float32).save_pretrained(path)
    write_tokenizer(path, ByteTokenizer(), CONFIG, TEMPLATE)
    return path


@pytest.fixture(scope="module")
def prompts():
    chosen = random.Random(0)
    return [[chosen.randrange(2, 258) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def want(folder, prompts):
    """The tokens of our own generator."""
    generator = Generator.from_pretrained(folder, device="cpu")
    completions = generator.generate(
        prompts, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=[]
    )
    return [list(completion.token_ids) for completion in completions]


def make_engine(folder, **options):
    options = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26} | options
    return LLM(str(folder), dtype="float32", max_model_len=1024, **options)


def greedy(count=NEW_TOKENS):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def generate(engine, prompts):
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return engine.generate(inputs, greedy(), use_tqdm=False)


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def scheduler_of(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler


def test_16_prompts_at_once_equal_our_generator(folder, prompts, want):
    """In the mode that vLLM chooses: the model is compiled."""
    engine = make_engine(folder, enforce_eager=False)
    outputs = generate(engine, prompts)
    assert tokens_of(outputs) == want
    # The model's first token is put before a prompt that lacks it, as our generator does.
    assert outputs[3].prompt_token_ids == [0, *prompts[3]]
    assert generate(engine, [[0, *prompts[3]]])[0].prompt_token_ids == [0, *prompts[3]]


def test_prompts_in_chunks_equal_whole_prompts(folder, prompts, want):
    engine = make_engine(folder, max_num_batched_tokens=48, max_num_seqs=6)
    assert tokens_of(generate(engine, prompts)) == want


def test_prefix_caching_changes_nothing(folder, prompts, want):
    engine = make_engine(folder, enable_prefix_caching=True, block_size=32)
    assert tokens_of(generate(engine, prompts)) == want
    again = generate(engine, prompts)
    assert tokens_of(again) == want
    # All but the tokens after the last multiple of 32 come from the cache.
    cached = [output.num_cached_tokens for output in again]
    assert cached == [len(prompt) // 32 * 32 for prompt in prompts]
    # A prompt that goes on where an earlier one ended starts from the state there.
    longer = [*prompts[-1], *prompts[-2]]
    found = generate(engine, [longer])[0]
    assert found.num_cached_tokens == 288
    alone = make_engine(folder, enable_prefix_caching=False)
    assert tokens_of([found]) == tokens_of(generate(alone, [longer]))


def test_preemption_changes_nothing(folder, prompts, want):
    """Too few slots for all requests: when one crosses a block, another has to give up its own."""
    heads, d_qk, d_hv = CONFIG.num_heads, CONFIG.d_qk, CONFIG.d_hv
    page = -(-4 * heads * (d_qk * d_hv + d_qk + 1) // 256) * 256
    engine = make_engine(
        folder,
        enable_prefix_caching=True,
        block_size=8,
        kv_cache_memory_bytes=14 * page * CONFIG.num_blocks,
    )
    scheduler, preempted = scheduler_of(engine), []
    preempt = scheduler._preempt_request

    def count(request, *arguments, **options):
        preempted.append(request.request_id)
        return preempt(request, *arguments, **options)

    scheduler._preempt_request = count
    assert tokens_of(generate(engine, prompts)) == want
    assert preempted


def test_requests_that_lose_their_states_are_resumed(folder, prompts, want):
    engine = make_engine(folder).llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, greedy())
    finished = {}
    for step in range(200):
        if step in (5, 12):
            engine.engine_core.engine_core.scheduler.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id.split("-")[0])] = output
        if not engine.has_unfinished_requests():
            break
    assert tokens_of([finished[number] for number in range(len(prompts))]) == want


def test_bfloat16_weights_keep_float32_states(folder, prompts):
    engine = LLM(
        str(folder), max_model_len=1024, enforce_eager=True, kv_cache_memory_bytes=1 << 26,
        dtype="bfloat16",
    )  # fmt: skip
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    cache = runner.model.backbone.blocks[0].mlstm_layer.kv_cache
    assert [part.dtype for part in cache] == [torch.float32] * 3
    assert [tuple(part.shape[1:]) for part in cache] == [(4, 16, 32), (4, 16), (4,)]
    generator = Generator.from_pretrained(folder, device="cpu", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"q\.weight is no parameter of xLSTM"):
        runner.model.load_weights([("q.weight", torch.ones(2))])
    ours = generator.generate(prompts, do_sample=False, max_new_tokens=1, eos_token_id=[])
    # Products are rounded in another order, so a close decision may differ.
    got = tokens_of(generate(engine, prompts))
    same = [a[0] == b.token_ids[0] for a, b in zip(got, ours, strict=True)]
    assert sum(same) >= len(prompts) - 2


@pytest.fixture
def server(folder):
    """`vllm serve FOLDER` with two processes, each with half of the heads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    options += ["--kv-cache-memory-bytes", str(1 << 26), "--tensor-parallel-size", "2"]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PROGRAM,
            "serve",
            folder,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *options,
        ],
        env=environment,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "vllm serve has ended"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def post(url, **body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def test_vllm_serve_with_two_processes_equals_one(server, folder, prompts, want):
    options = {"model": str(folder), "temperature": 0, "max_tokens": NEW_TOKENS}
    answer = post(
        f"{server}/v1/completions",
        prompt=prompts,
        ignore_eos=True,
        return_token_ids=True,
        **options,
    )
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert [choice["token_ids"] for choice in choices] == want
    # Text and chat messages have the same first token too, once.
    text = post(f"{server}/v1/completions", prompt="Hello", return_token_ids=True, **options)
    message = [{"role": "user", "content": "Hello"}]
    chat = post(f"{server}/v1/chat/completions", messages=message, return_token_ids=True, **options)
    ids = [0, *ByteTokenizer().encode("Hello")]
    assert text["choices"][0]["prompt_token_ids"] == chat["prompt_token_ids"] == ids
    assert text["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]


# The config


INT8 = Quantization.named("int8").to_dict()


def write_config(folder, **changes):
    values = ModelConfig(128, 2, 4).to_dict() | changes
    folder.joinpath("config.json").write_text(json.dumps(values))
    return folder


def test_the_released_config_is_read_and_corrected(tmp_path):
    """It names kernels that `transformers` refuses, and "!" as the end of a text."""
    load_general_plugins()
    kernels = {"chunkwise_kernel": "chunkwise--triton_xl_chunk", "step_kernel": "triton"}
    write_config(tmp_path, **kernels, sequence_kernel="native_sequence__triton", eos_token_id=2)
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 2}')
    model = EngineArgs(str(tmp_path), skip_tokenizer_init=True).create_model_config()
    assert model.hf_config.to_model_config() == ModelConfig(128, 2, 4)
    assert model.try_get_generation_config()["eos_token_id"] == 0
    assert model.max_model_len == 131_072
    assert model.dtype == torch.bfloat16  # of float32 weights


def test_a_model_without_soft_caps_is_known(tmp_path):
    load_general_plugins()
    config = ModelConfig(128, 2, 4, gate_soft_cap=None, output_logit_soft_cap=None)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    model = EngineArgs(str(tmp_path), skip_tokenizer_init=True).create_model_config()
    assert model.hf_config.to_model_config() == config
    assert model.is_attention_free


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": "previous", "model_type": "xlstm7b"}, "block = 'previous'.*use `xlstm7b serve`"),
        ({"use_bias": True}, "use_bias = True is not supported"),
        ({"quantization_config": INT8}, "a folder with quantised weights"),
    ],
)
def test_a_model_that_is_not_supported_is_named(tmp_path, changes, message):
    load_general_plugins()
    write_config(tmp_path, **changes)
    with pytest.raises(Exception, match=message):
        EngineArgs(str(tmp_path), skip_tokenizer_init=True).create_model_config()


def test_speculative_decoding_is_refused(folder):
    load_general_plugins()
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    arguments = EngineArgs(str(folder), max_model_len=512, speculative_config=drafts)
    with pytest.raises(Exception, match="speculative decoding is not supported for xLSTM"):
        arguments.create_engine_config()
